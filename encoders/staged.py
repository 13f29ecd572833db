"""Base of encoders in pipeline stages: all media of a microbatch go through the layers together.

Media of one size are a batch. Of several sizes they stand one behind the other in one packed row, in which attention
stays inside each of them, and those of one size are neighbours: all but attention is computed for the whole row.

Embeddings are on the first stage and the final norm is on the last. Between stages the tokens of all media (images or
clips) are sent, in the order in which they stand in the row.

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
"""Of one medium as the encoder gets it: (height, width), or (samples, samples per second)."""


class StagedEncoder(MegatronModule, ABC):
    """Media -> features: one pipeline stage of an encoder. The layers are the same for all families; each family
    defines how media become tokens and how tokens become features.

    Args:
        config: sizes and parallelism of the layers; `config.init_seed` seeds the weights outside of the layers.
            `config.documents` makes of the tokens of each medium what tells the layers where media are in a packed row;
            with `windows`, the tokens of each window, also in which windows some layers attend.
        spec: sizes of media and layers.
        layer_spec: spec of one transformer layer.
        norm: builder of the final norm.
        merge: how many neighbours become one output token (`EncoderSpec.joined`).
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
            pre_process=True,  # its input is handed over as an argument, on every stage
            post_process=self.is_last_stage,
            post_layer_norm=spec.final_norm,
            pg_collection=pg_collection,
        )
        if not spec.key_bias:
            for layer in self.layers.layers:
                _keep_key_bias_zero(layer.self_attention.linear_qkv.bias, config.kv_channels)

    @abstractmethod
    def _build_embeddings(self) -> None:
        """Make what is in front of the layers."""

    @abstractmethod
    def _embed(self, media: torch.Tensor | Sequence[torch.Tensor], sizes: Sequence[Size]) -> torch.Tensor:
        """Media, those of one size neighbours -> the input of the first layer, [R, H]."""

    @abstractmethod
    def _features(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Rows of the last layer, those that make one token neighbours -> features, [output tokens, width]."""

    @abstractmethod
    def _tokens(self, size: Size) -> int:
        """Tokens inside the encoder of a medium of `size`."""

    def rows_of(self, sizes: Sequence[Size]) -> int:
        """Rows that the layers get of media of these sizes."""
        return sum(map(self._tokens, sizes))

    def through_layers(self, rows_RH: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
        """The layers of this stage alone, over rows [`rows_of(sizes)`, H] of media of which those of one size are
        neighbours; rows of the last one."""
        return self._run_layers(rows_RH, sizes)

    def _last_tokens(self, size: Size) -> int:
        """Tokens that the layers make of a medium of `size`."""
        return self._tokens(size)

    def _kept(self, size: Size) -> torch.Tensor | None:
        """Places, among the rows that the layers make of a medium, of those that become features, in their order; None:
        all, as they are."""
        return None

    def _run(
        self,
        media: torch.Tensor | Sequence[torch.Tensor] | None,
        sizes: Sequence[Size],
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor:
        """What this stage makes of media of these sizes: `media` on the first stage, else `hidden_states` [R, H].

        Returns:
            On the last stage features, of one medium after the other, [output tokens, width]; before it the tokens
            inside the encoder, [R, H].
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
        """The rows that become features, of one medium after the other.

        Args:
            groups: numbers of the media of each size, as they stand in the rows.
        """
        order = [member for members in groups.values() for member in members]
        kept = {size: self._kept(size) for size in groups}
        if all(one is None for one in kept.values()) and order == sorted(order):
            return rows_RH
        first = 0
        places: dict[int, torch.Tensor] = {}
        for size, members in groups.items():
            own, count = kept[size], self._last_tokens(size)
            starts = first + count * torch.arange(len(members))[:, None]
            places |= zip(members, starts + (torch.arange(count) if own is None else own), strict=True)
            first += count * len(members)
        # Every row once at most, so that no sum of gradients depends on the order of a device's threads.
        picked = torch.cat([places[member] for member in range(len(order))])
        return rows_RH.index_select(0, to_device(picked, rows_RH.device))

    def _is_batch(self, sizes: Sequence[Size]) -> bool:
        """Whether the layers get media of these sizes as a batch; else as a packed row."""
        return len(set(sizes)) == 1

    def _documents(self, sizes: Sequence[Size]) -> PackedSeqParams:
        """Where media of these sizes are in a packed row."""
        return self.config.documents([self._tokens(size) for size in sizes])

    def _layer_inputs(self, sizes: Sequence[Size]) -> dict[str, Any]:
        """What every layer gets beside hidden states of media of `sizes`, one behind the other, by the names that a
        layer gives it."""
        return {}

    def _run_layers(self, rows_RH: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
        """The layers of this stage. With sequence parallelism each rank has S / tp tokens of the sequence in them; all
        else, here and between stages, is whole on every rank."""
        inputs: dict[str, Any] = {"attention_mask": None}
        if self._is_batch(sizes):
            hidden_SBH = rows_RH.unflatten(0, (len(sizes), -1)).transpose(0, 1).contiguous()
            inputs |= self._layer_inputs(sizes[:1])
        else:
            hidden_SBH = rows_RH.unsqueeze(1)
            inputs |= self._layer_inputs(sizes) | {"packed_seq_params": self._documents(sizes)}
        if self.config.sequence_parallel:
            own = scatter_to_sequence_parallel_region(hidden_SBH, group=self.tp_group)
            # The gradient of what follows is whole on every rank too: each takes its part of it, nothing is summed.
            hidden_SBH = gather_from_sequence_parallel_region(
                self._states(own, inputs), tensor_parallel_output_grad=False, group=self.tp_group
            )
        else:
            hidden_SBH = self._states(hidden_SBH, inputs)
        return hidden_SBH.transpose(0, 1).flatten(0, 1)

    def _states(self, hidden_SBH: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """What the layers of this stage make of it."""
        return self.layers(hidden_SBH, **inputs)


def _keep_key_bias_zero(bias_of_qkv: torch.nn.Parameter, head: int) -> None:
    """Stop the gradient of the keys' part of the bias of queries, keys and values, which is zero in the beginning: the
    published model has none."""
    kept = torch.ones(3, 1).index_fill_(0, torch.tensor(1), 0)  # query, key and value of each head

    def without_keys(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.view(-1, 3, head) * kept.to(gradient)).view(-1)

    bias_of_qkv.register_hook(without_keys)


def by_size(sizes: Sequence[Size]) -> dict[Size, list[int]]:
    """Numbers of the media of each size, in the order in which sizes appear."""
    groups: dict[Size, list[int]] = {}
    for number, (extent0, extent1) in enumerate(sizes):
        groups.setdefault((extent0, extent1), []).append(number)
    return groups


def stacked(media: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Media of one size as one tensor."""
    return media if isinstance(media, torch.Tensor) else torch.stack(list(media))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. From memory that is not pinned the host would wait for the copy, behind all
    that is queued on the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
