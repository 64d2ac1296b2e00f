"""The embedded target-draft decoder: sequences, their scheduler, verification, and the engine that steps them."""
