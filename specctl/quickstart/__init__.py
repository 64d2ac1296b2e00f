"""quickstart: one command to a measured speed-up: a small real model, prompts of our own, a report to read.

Reading order: model (what runs), plan (how much), verdict (what it came to), page (how it looks), run.
"""
