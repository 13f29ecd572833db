"""mimo-train: train vision-language and audio-language models on Megatron-Core, each module with its own layout."""

import warnings

# pynvml, which nvidia-resiliency-ext 0.3.0 brings along, makes torch warn at its import in every process.
warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)

__version__ = "0.1.0"
