"""Profiling: what each kind of step costs on this machine, over a grid of batches and contexts, as PROFILE.yaml.

Reading order: grid (which cells), clockwork (timing many things in turn), passes (what a cell runs), overheads (what
the engine adds), run; command and render around it.
"""
