"""Tuning: the draft length that makes decoding fastest at every batch and context, as POLICY.yaml.

It looks for speed: acceptance is what the draft has, and lossy rules are chosen only within a budget that was given for
them. Reading order: cells and costs (what a step takes), rates, acceptance and evidence (what it brings, and what a
confidence stop would change), goodput (both together), choice, ranges, run. Where acceptance is read from: reading,
counters, request_metrics, table; here and watching measure it. What it means: mix, load, prefill, limits, compare,
study, what_if; lossy and budget. wishes and command around all of it; render, as_json, page, plots and report show it,
outputs/ are files for other engines.
"""
