"""Imported once by the fork server: what every rank of every test would otherwise import for itself (about 15 s)."""
# ruff: noqa: E402

import gc
import os
import sys

# One thread a rank, whatever a user's environment says, but for scripts/compare_layouts.sh --threads.
os.environ["OMP_NUM_THREADS"] = os.environ.get("MIMO_RANK_THREADS", "1")
# Megatron-Core asks at its import whether there is CUDA. Asked through the driver, which is torch's way without this,
# it would leave the ranks that are forked from here unable to use a device.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# `fla`, which Megatron-Core imports where it is installed, opens the device (0.6.0, fla/utils/hardware.py:101).
sys.modules["fla"] = None  # type: ignore[assignment]

import peft  # noqa: F401
import pytest  # noqa: F401  (imported by the files of tests that ranks take their functions from)
import torch

# Classes are named, as transformers imports the files of a class when its name is asked for. Llama and CLIP bring what
# every model and every image's preprocessing needs.
from transformers import (  # noqa: F401
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionModel,
    GenerationMixin,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

import mimo_train.training.pretrain  # noqa: F401
from encoders.registry import family_of

family_of("vit")  # reads once which packages bring encoders: every rank asks
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# What is imported here is no garbage: collections in ranks need not look through it.
gc.freeze()
