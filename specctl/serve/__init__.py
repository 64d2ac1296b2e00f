"""The HTTP server: request bodies (`fields`, `openai`), responses (`answers`)."""
