"""`specctl finetune`: from rows of data and a target to a draft."""
