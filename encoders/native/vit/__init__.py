"""Vision transformers."""
