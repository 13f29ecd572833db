"""Weights of a model under their names in the hub, gathered over the ranks: an export without files."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.text.tokens import Tokenizer
from mimo_train.checkpoint.local_shards import LocalShard, shards_of_module
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.export import documents_of
from mimo_train.hf.export import contents_of
from mimo_train.models.lora.adapters import adapted_layers, quantized_layers
from mimo_train.models.parameters import gathered, modules_of
from mimo_train.models.transformer_config import DTYPES


def named_weights(
    cfg: ConfigContainer, tokenizer: Tokenizer, model: list[MegatronModule], device: torch.device, dtype: str = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of everything that an export writes, one after the other, on every rank. Adapters are
    merged. If an export has several directories, names begin with the directory's. Collective over all ranks: all of
    them take every tensor.

    Args:
        dtype: fp32, bf16 or fp16; empty: `train.precision`.

    Raises:
        UserError: a class of transformers is not on all ranks.
    """
    documents, _ = documents_of(cfg, tokenizer)
    with gathered(model), torch.no_grad():
        modules = {name: GatheredWeights(name, modules_of(model).get(name, []), device) for name in cfg.modules}
        for document in documents:
            prefix = f"{document.name}/" if len(documents) > 1 else ""
            sources = {name: modules[name] for name in document.modules}
            planned, values = contents_of(document, sources, DTYPES[dtype or cfg.train.precision])
            for tensor, value in zip(planned, values, strict=True):
                yield prefix + tensor.name, value


class GatheredWeights:
    """The tensors of one module, whose parts are on several ranks. Collective over all ranks.

    Attributes:
        tensors: by name, without values.
    """

    def __init__(self, module: str, chunks: list[MegatronModule], device: torch.device):
        """`chunks` are this rank's."""
        self._module, self._device = module, device
        self._chunks = [unwrap_model(chunk) for chunk in chunks]
        self._shards: dict[str, list[LocalShard]] = {}
        self._layers: dict[int, Any] = {}
        local: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}
        for chunk, inner in zip(chunks, self._chunks, strict=True):
            if any(True for _ in quantized_layers(inner)):
                raise UserError(
                    f"modules.{module}.lora.quantization: quantized weights cannot be handed out. Export the run"
                )
            self._layers |= {id(layer.weight): layer for _, layer in adapted_layers(inner)}
            shards = {id(shard.tensor): shard for shard in shards_of_module(module, chunk)}
            for shard in shards.values():
                self._shards.setdefault(shard.name, []).append(shard)
                local[shard.name] = shard.name, shard.boxes[0][1].shape, shard.tensor.dtype
            # Tied weights have several names.
            tensors = (*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False))
            names = [(name, shards[id(value)]) for name, value in tensors if id(value) in shards]
            if len({name for name, _ in names}) > len(shards):
                local |= {name: local[shard.name] for name, shard in names if name not in local}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, local)
        self._tensors: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {}
        for of_rank in of_ranks:
            self._tensors |= {name: tensor for name, tensor in of_rank.items() if name not in self._tensors}
        self._is_everywhere = all(of_ranks)
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (_, shape, dtype) in self._tensors.items()
        }

    @property
    def model(self) -> MegatronModule:
        """The module, for formats that only its class can write. Raises UserError if it is not on every rank."""
        if not self._is_everywhere:
            raise UserError(
                f"modules.{self._module}.layout: its class of transformers names its weights itself, and it is not on "
                "all ranks. Place it with the other modules (placement.mode=shared)"
            )
        return self._chunks[0]

    def load(self, name: str) -> torch.Tensor:
        """Return the value of a tensor, on every rank."""
        stored, shape, dtype = self._tensors[name]
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        for shard in self._shards.get(stored, []):
            value = self._value(shard.tensor)
            if any(shard.replica):
                continue
            for start, span in shard.boxes:
                part = value.reshape(-1)[start : start + span.numel].view(span.size)
                tensor[tuple(slice(at, at + size) for at, size in zip(span.offset, span.size, strict=True))] = part
        # Each element is on one rank, and 0 on all others. Sums of bytes keep the sign of zeros, and every other bit.
        if tensor.numel():
            dist.all_reduce(tensor.view(-1).view(torch.uint8))
        return tensor

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor, with adapters merged."""
        layer = self._layers.get(id(tensor))
        return tensor.detach() if layer is None else layer.merged_weight().to(tensor.dtype)
