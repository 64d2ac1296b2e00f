"""`convert-mtp`: the MTP layer of a DeepSeek checkpoint, taken out and written as a reader wants it."""
