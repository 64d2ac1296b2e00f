"""The sampling floor: what a request asks for (`params`), how logits become scores (`process`), keyed noise (`noise`),
and one batch of sequences' sampling as tensors (`batch`). Draft and target share all of it."""
