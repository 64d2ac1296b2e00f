"""Files that people and other tools read: reports, policies, each a checked model. Unknown keys are refused by name."""
