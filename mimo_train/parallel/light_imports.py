"""The import of Megatron-Core without what a run does not use of it.

Megatron-Core 0.19.2 imports wandb and TensorBoard for timers that report to them, which we do not use, and compiles its
small fusions where they are defined, which imports torch's compiler; on the CPU they run eagerly. Together they take a
third of the time until a run's first step. Once imported, everything is as released.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

REFUSED = ("wandb", "torch.utils.tensorboard")


class _Refusal(MetaPathFinder):
    """Finds nothing, and says of what is refused that it is not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in REFUSED:
            raise ModuleNotFoundError(f"{fullname} is not imported with Megatron-Core", name=fullname)


@contextmanager
def light_imports(device: str) -> Iterator[None]:
    """A block that imports Megatron-Core.

    Args:
        device: `run.device`; what is defined in the block is not compiled with `cpu`, nor with `auto` where torch finds
            no CUDA.
    """
    refusal, compiler = _Refusal(), torch.compile
    sys.meta_path.insert(0, refusal)
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler
        sys.meta_path.remove(refusal)


def _uncompiled(model: Callable | None = None, **options: Any) -> Callable:
    """In the place of `torch.compile`, with options as a decorator too."""
    return model if model is not None else lambda function: function
