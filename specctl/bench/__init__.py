"""Measuring: plain, speculative and transformers' own decoding of the same prompts, interleaved, texts compared.

Reading order: work (what is asked), runners and baseline (who answers), contest (in which order, timed), compare (what
times and texts say), passes and anatomy (where time goes), trace, report, run; render and plots show it.
"""
