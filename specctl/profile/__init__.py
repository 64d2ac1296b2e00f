"""Profiling: what each kind of step costs, over a grid of batches and contexts, as PROFILE.yaml; on this machine, or in
an engine that runs somewhere (served/).

Reading order: timing (medians, turns), grid (which cells), clockwork (timing many things in turn), passes (what a cell
runs), overheads (what the engine adds), run; same, whole, merge and base (cells put into another profile); places (the
batches and contexts of any of them); command and render around it.
"""
