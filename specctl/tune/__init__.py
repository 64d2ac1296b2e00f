"""Tuning: the draft length that makes decoding fastest at every batch and context, as POLICY.yaml.

It looks for speed and nothing else: acceptance is what the draft has, and lossy rules are never chosen. Reading order:
costs (what a step takes), acceptance and evidence (what it brings, and what a confidence stop would change), goodput
(both together), choice, ranges, run; source and command around it, render shows it.
"""
