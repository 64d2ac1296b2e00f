"""A draft written for an engine, and proven to be the same draft to it: one file a kind, and what they share."""
