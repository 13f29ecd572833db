"""Vision and audio models of the library `transformers` as they are: data parallel only. See docs/your-encoder.md."""
