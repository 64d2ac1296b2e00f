"""What a draft head is: its tensors by name and shape, its order of inputs, its norms. Shared by drafts and
dialects."""
