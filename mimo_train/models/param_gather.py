"""Parameters that are gathered while the forward pass runs (`optim.overlap_param_gather`).

Forward pre-hooks on Megatron-Core's wrappers of these modules wait for them. Code that reads parameters outside of a
forward pass, to save them for example, must use `gathered`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule

from mimo_train.models.names import modules_of


@contextmanager
def gathered(model: list[MegatronModule]) -> Iterator[None]:
    """Complete the gathering at the start of the `with` block, so that parameters are current inside it. Collective if
    modules overlap."""
    hooked = [*overlapping_chunks(model)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def overlapping_chunks(model: list[MegatronModule]) -> Iterator[DistributedDataParallel]:
    """The wrapped chunks of this rank whose parameters are gathered while they compute."""
    for chunks in modules_of(model).values():
        for chunk in chunks:
            if getattr(chunk, "use_forward_hook", False):
                yield chunk
