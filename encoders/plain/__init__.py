"""Encoders that are plain torch modules, without Megatron-Core's layers: data parallel only (docs/your-encoder.md)."""
