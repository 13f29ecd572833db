"""The vision transformer of Qwen2.5-VL."""
