"""specctl: from a fine-tuned target model to a proven speculative-decoding set-up."""

__version__ = "0.1.0"
