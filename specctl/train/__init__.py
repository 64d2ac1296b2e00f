"""Training of drafts: examples, packing, losses, the loop and what it saves. Files and commands are the floors'
above."""
