"""A running engine, measured from outside: requests of known size, and what their streams show.

Reading order: wire (HTTP), engine (what it says of itself), streams (requests at a time), steps (from events to steps),
meter (one place of the grid), run (rounds of all places), document (what of it becomes cells); command around it.
"""
