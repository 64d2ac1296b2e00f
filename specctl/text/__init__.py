"""The text floor: chat messages, prompts to token ids, ids to text piece by piece, and strings that end a text."""
