"""The vision transformer of Qwen3-VL."""
