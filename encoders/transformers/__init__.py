"""Unmodified vision and audio models of the library `transformers`: data parallel only. See docs/your-encoder.md."""
