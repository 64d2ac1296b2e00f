"""What a pass of any model costs on a GPU, from its config.json and some twenty constants of the device and the engine.

Nothing is run and no torch is loaded. Reading order: shape (what a config says), experts (how many of them a step
reads), operators (the time of one kernel), passes (of a whole pass), memory (what fits), drafts, grid, offer (a profile
from all that), reading (a profile as it is used), serving (what a user sees beside other users' prompts).
"""
