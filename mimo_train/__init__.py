"""mimo-train: train vision-language and audio-language models on Megatron-Core, each module with its own layout."""

__version__ = "0.1.0"
