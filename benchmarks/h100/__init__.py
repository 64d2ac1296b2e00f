"""Published measurements of H100 and H200, replayed: what the rooflines and the operator sums say about each. Parts of
benchmarks/tune_h100.py."""
