"""The cache floor: pages of slots (`pages`), the tensors behind them (`cache`), and packed batches (`batch`)."""
