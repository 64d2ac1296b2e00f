"""quickstart: one command from nothing to a measured speed-up: a small real model, prompts of our own, a report to read."""
