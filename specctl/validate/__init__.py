"""Judging a pair before it is released: what was measured is held against gates, and nothing measured never passes.

Reading order: evidence (a report), figures with their intervals, verdicts (a gate's result), judges and regression
(gates over figures), pair, measure, distribution and draft_cache (gates over models), run; render and command show it.
"""
