"""Forward pre-hooks, which wait for parameters that are gathered while the forward pass runs.

They are there with `optim.overlap_param_gather`, on Megatron-Core's wrappers of the modules that overlap. Whoever
reads parameters outside of a forward pass, to save them for example, takes the hooks off first, which completes the
gathering.
"""

from collections.abc import Iterator

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from mimo_train.model.build import modules_of


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """Whether the hooks must be off while a checkpoint is written: with the distributed optimizer and overlapped
    gathering, except under Megatron-FSDP, which gathers in another way."""
    return not use_megatron_fsdp and use_distributed_optimizer and overlap_param_gather


def enable_forward_pre_hook(model: list[MegatronModule]) -> None:
    """Put the hooks back.

    Args:
        model: the model chunks of this rank: wrapped modules, or a `MimoModel` of them.
    """
    for chunk in _hooked(model):
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: list[MegatronModule], param_sync: bool = True) -> None:
    """Take the hooks off.

    Args:
        model: the model chunks of this rank: wrapped modules, or a `MimoModel` of them.
        param_sync: gather at once what the last step has updated. Collective then.
    """
    for chunk in _hooked(model):
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def _handle_mxfp8_param_buffer_copy(
    optimizer: MegatronOptimizer, reuse_grad_buf_for_mxfp8_param_ag: bool, overlap_param_gather: bool
) -> None:
    """Copy main parameters to the buffer that is gathered, where that buffer is the one of the gradients.

    MXFP8 parameters may be gathered through the gradient buffer. With overlap the gathering begins in the next forward
    pass, after the buffer has been zeroed for its gradients, so the copy is made here, behind the zeroing.

    Args:
        optimizer: of one module, of several (a `MimoOptimizer`), or a chain of optimizers.
        reuse_grad_buf_for_mxfp8_param_ag: whether the two share a buffer.
        overlap_param_gather: whether gathering overlaps the forward pass.
    """
    if not (reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather):
        return
    if hasattr(optimizer, "module_infos"):
        for info in optimizer.module_infos.values():
            if info.optimizer is not None:
                _handle_mxfp8_param_buffer_copy(info.optimizer, True, True)
    elif hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            _handle_mxfp8_param_buffer_copy(part, True, True)
    elif hasattr(optimizer, "_copy_main_params_to_param_buffer"):
        optimizer._copy_main_params_to_param_buffer()


def _hooked(model: list[MegatronModule]) -> Iterator[DistributedDataParallel]:
    for chunks in modules_of(model).values():
        for chunk in chunks:
            if getattr(chunk, "use_forward_hook", False):
                yield chunk
