"""Base of encoders in pipeline stages: all media of a microbatch go through the layers together.

Media of one size are a batch. Media of several sizes share one packed row, in which attention stays inside each of
them; all else is computed for the whole row. Items of one size are adjacent.

Embeddings are on the first stage and the final norm is on the last. Stages exchange the tokens of all media, in the
order of the row.

Shape suffixes: N media of one size, T tokens of one inside the encoder, H hidden size, R rows: tokens of all media; S
and B of the layers: T and N of media of one size, R and 1 of a packed row.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.base import LayeredSpec

Size = tuple[int, int]
"""Size of a media item as the encoder gets it: (height, width), or (samples, samples per second)."""


class StagedEncoder(MegatronModule, ABC):
    """One pipeline stage of an encoder: media -> features.

    The layers are the same for all families. Each family defines how media become tokens and how tokens become
    features.

    Args:
        config: sizes and parallelism of the layers. `config.init_seed` seeds the weights outside of the layers.
            `config.documents` makes the documents of a packed row from the tokens of each media item; with `windows`,
            the tokens of each window, also the windows in which some layers attend.
        spec: sizes of media and layers.
        layer_spec: spec of one transformer layer.
        norm: builder of the final norm.
        merge: number of adjacent features in one output token (`EncoderSpec.joined`).
        pg_collection: process groups of this module; the rank in `pp` is the stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: LayeredSpec,
        layer_spec: ModuleSpec,
        norm: type,
        merge: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config=config)
        self.spec, self.merge, self.tp_group = spec, merge, pg_collection.tp
        stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
        self.is_first_stage, self.is_last_stage = stage == 0, stage == stages - 1
        if self.is_first_stage:
            self._build_embeddings()
        layers = get_num_layers_to_build(config, vp_stage=None, pp_rank=stage)
        self.layers = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=[layer_spec] * layers, layer_norm=norm),
            pre_process=True,  # every stage gets its input as an argument
            post_process=self.is_last_stage,
            post_layer_norm=spec.final_norm,
            pg_collection=pg_collection,
        )
        if not spec.key_bias:
            for layer in self.layers.layers:
                _keep_key_bias_zero(layer.self_attention.linear_qkv.bias, config.kv_channels)

    @abstractmethod
    def _build_embeddings(self) -> None:
        """Build the layers before the transformer layers."""

    @abstractmethod
    def _embed(self, media: torch.Tensor | Sequence[torch.Tensor], sizes: Sequence[Size]) -> torch.Tensor:
        """Embed media as the input of the first layer, [R, H]. Items of one size are adjacent."""

    @abstractmethod
    def _features(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Return features, [output tokens, width], from rows of the last layer. Rows of one token are adjacent."""

    @abstractmethod
    def _tokens(self, size: Size) -> int:
        """Return the tokens inside the encoder of a media item of `size`."""

    def _last_tokens(self, size: Size) -> int:
        """Return the rows of a media item of `size` after the layers."""
        return self._tokens(size)

    def _kept(self, size: Size) -> torch.Tensor | None:
        """Return the indices of a media item's rows that become features, in order; None: all, as they are."""
        return None

    def _run(
        self,
        media: torch.Tensor | Sequence[torch.Tensor] | None,
        sizes: Sequence[Size],
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run this stage on media of these sizes: `media` on the first stage, else `hidden_states` [R, H].

        Returns:
            On the last stage features in the order of the media, [output tokens, width]; before it the tokens inside
            the encoder, [R, H].
        """
        groups = by_size(sizes)
        ordered = [size for size, members in groups.items() for _ in members]
        if self.is_first_stage:
            assert media is not None, "the first stage makes its output of media"
            if not isinstance(media, torch.Tensor):  # of one size
                media = [media[member] for members in groups.values() for member in members]
            rows_RH = self._embed(media, ordered)
        else:
            assert hidden_states is not None, "a later stage makes its output of what the stage before gave"
            rows_RH = hidden_states
        rows_RH = self._run_layers(rows_RH, ordered)
        return self._features(self._picked(rows_RH, groups)) if self.is_last_stage else rows_RH

    def _picked(self, rows_RH: torch.Tensor, groups: Mapping[Size, Sequence[int]]) -> torch.Tensor:
        """Return the rows that become features, in the order of the media. `groups` has the numbers of the media of
        each size."""
        order = [member for members in groups.values() for member in members]
        kept = {size: self._kept(size) for size in groups}
        if all(part is None for part in kept.values()) and order == sorted(order):
            return rows_RH
        first = 0
        places: dict[int, torch.Tensor] = {}
        for size, members in groups.items():
            indices, count = kept[size], self._last_tokens(size)
            starts = first + count * torch.arange(len(members))[:, None]
            places |= zip(members, starts + (torch.arange(count) if indices is None else indices), strict=True)
            first += count * len(members)
        # Every row at most once, so that no gradient sum depends on the order of a device's threads.
        picked = torch.cat([places[member] for member in range(len(order))])
        return rows_RH.index_select(0, to_device(picked, rows_RH.device))

    def _is_batch(self, sizes: Sequence[Size]) -> bool:
        """True if the layers get media of these sizes as a batch, else as a packed row."""
        return len(set(sizes)) == 1

    def _documents(self, sizes: Sequence[Size]) -> PackedSeqParams:
        return self.config.documents([self._tokens(size) for size in sizes])

    def _layer_inputs(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """Return further arguments of every layer for media of `sizes`, by name."""
        return {}

    def _run_layers(self, rows_RH: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
        """Run the layers of this stage. With sequence parallelism each rank has S / tp tokens inside the layers.
        Everything else, here and between stages, is whole on every rank."""
        inputs: dict[str, Any] = {"attention_mask": None}
        if self._is_batch(sizes):
            hidden_SBH = rows_RH.unflatten(0, (len(sizes), -1)).transpose(0, 1).contiguous()
            inputs |= self._layer_inputs(sizes[:1])
        else:
            hidden_SBH = rows_RH.unsqueeze(1)
            inputs |= self._layer_inputs(sizes) | {"packed_seq_params": self._documents(sizes)}
        if self.config.sequence_parallel:
            local = scatter_to_sequence_parallel_region(hidden_SBH, group=self.tp_group)
            # The gradient of the output is whole on every rank: each takes its part, and nothing is summed.
            hidden_SBH = gather_from_sequence_parallel_region(
                self._states(local, inputs), tensor_parallel_output_grad=False, group=self.tp_group
            )
        else:
            hidden_SBH = self._states(hidden_SBH, inputs)
        return hidden_SBH.transpose(0, 1).flatten(0, 1)

    def _states(self, hidden_SBH: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return self.layers(hidden_SBH, **inputs)


def _keep_key_bias_zero(bias_of_qkv: torch.nn.Parameter, head: int) -> None:
    """Stop the gradient of the keys' part of the qkv bias, which starts at zero: the published model has no key
    bias."""
    kept = torch.ones(3, 1).index_fill_(0, torch.tensor(1), 0)  # query, key and value of each head

    def without_keys(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.view(-1, 3, head) * kept.to(gradient)).view(-1)

    bias_of_qkv.register_hook(without_keys)


def by_size(sizes: Sequence[Size]) -> dict[Size, list[int]]:
    """Return the numbers of the media of each size, in order of first appearance."""
    groups: dict[Size, list[int]] = {}
    for number, (extent0, extent1) in enumerate(sizes):
        groups.setdefault((extent0, extent1), []).append(number)
    return groups


def stacked(media: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack media of one size into one tensor."""
    return media if isinstance(media, torch.Tensor) else torch.stack(list(media))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`. Pinned memory, since the host would wait for a copy from other memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
