"""The vision transformers of Qwen2.5-VL and Qwen3-VL."""
