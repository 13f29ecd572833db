"""Move weights, gradients and optimizer states of a model to the host and back, so that another program can use the
device. Tensors keep their identity: only their memory is freed."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel

from mimo_train.config.errors import UserError
from mimo_train.models.parameters import modules_of
from mimo_train.optim.module_optimizer import ModuleOptimizer

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"


class Offloaded:
    """The memory of a model and its optimizer, each kind on the device or on the host."""

    def __init__(self, model: list, optimizer: ModuleOptimizer):
        self._model, self._optimizer = model, optimizer
        self._on_host: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}

    def offload(self, kinds: Iterable[str]) -> None:
        """Move these kinds to the host. Gradients are dropped: a step begins from zeros."""
        storages = self._storages()
        for kind in kinds:
            if kind not in self._on_host:
                self._on_host[kind] = [_moved(storage, kind != GRADIENTS) for storage in storages[kind]]

    def onload(self, kinds: Iterable[str]) -> None:
        """Move these kinds back to the device."""
        for kind in kinds:
            for storage, size, copy in self._on_host.pop(kind, []):
                storage.resize_(size)
                restored = _bytes(storage)
                if copy is None:
                    restored.zero_()
                else:
                    restored.copy_(copy, non_blocking=True)

    def require_on_device(self, doing: str) -> None:
        """Raise UserError if anything is on the host."""
        if self._on_host:
            raise UserError(f"{doing}: {', '.join(self._on_host)} are on the host. Call onload() first")

    def _storages(self) -> dict[str, list[torch.UntypedStorage]]:
        """Return the memory of each kind, each once."""
        seen: set[int] = set()
        storages: dict[str, list[torch.UntypedStorage]] = {}
        for kind, tensors in (
            (GRADIENTS, self._gradients()),
            (WEIGHTS, self._weights()),
            (OPTIMIZER, self._states()),
        ):
            storages[kind] = []
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # By address: a tensor returns another object at each call.
                if storage.nbytes() and storage.data_ptr() not in seen and storage.resizable():
                    seen.add(storage.data_ptr())
                    storages[kind].append(storage)
        return storages

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunks in modules_of(self._model).values():
            for chunk in chunks:
                if isinstance(chunk, DistributedDataParallel):
                    yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _weights(self) -> Iterator[torch.Tensor]:
        for chunk in self._model:
            for tensor in (*chunk.parameters(), *torch.nn.Module.buffers(chunk)):
                yield tensor.data

    def _states(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizer.inner():
            if optimizer.is_stub_optimizer:
                continue
            for group in optimizer.optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for parameter, state in optimizer.optimizer.state.items():
                # `optim.offload` has them on the host already.
                yield from (value for value in state.values() if value.device == parameter.device)


def _moved(storage: torch.UntypedStorage, is_kept: bool) -> tuple[torch.UntypedStorage, int, torch.Tensor | None]:
    size, copy = storage.nbytes(), None
    if is_kept:
        copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        copy.copy_(_bytes(storage))
    storage.resize_(0)
    return storage, size, copy


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
