"""Base of encoders in pipeline stages: media of equal size go through the layers together.

Embeddings are on the first stage and the final norm is on the last. Between stages a packed tensor is sent: the
tokens of all media (pictures or clips), one after the other.

Shape suffixes: N media of one size, T tokens inside the encoder, H hidden size, R rows: tokens of all media.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
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

from encoders.spec import EncoderSpec, has_final_norm

Size = tuple[int, int]
"""Of one medium as the encoder gets it: (height, width), or (samples, samples per second)."""


class StagedEncoder(MegatronModule, ABC):
    """Media -> features: one pipeline stage of an encoder. The layers are the same for all families; each family
    defines how media become tokens and how tokens become features.

    Args:
        config: sizes and parallelism of the layers; `config.init_seed` seeds the weights outside of the layers.
        spec: sizes of media and layers.
        layer_spec: spec of one transformer layer.
        norm: builder of the final norm.
        merge: how many neighbours become one output token (`EncoderSpec.joined`).
        pg_collection: process groups of this module; the rank in `pp` is the stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: EncoderSpec,
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
            post_layer_norm=has_final_norm(spec),
            pg_collection=pg_collection,
        )
        if not getattr(spec, "key_bias", True):
            for layer in self.layers.layers:
                _keep_key_bias_zero(layer.self_attention.linear_qkv.bias, config.kv_channels)

    @abstractmethod
    def _build_embeddings(self) -> None:
        """Make what is in front of the layers."""

    @abstractmethod
    def _embed(self, media: torch.Tensor) -> torch.Tensor:
        """Media of one size, [N, ...] -> the input of the first layer, [N, T, H]."""

    @abstractmethod
    def _features(self, hidden_NTH: torch.Tensor, size: Size) -> torch.Tensor:
        """The output of the last layer for media of `size` -> features, [N, output tokens, width]."""

    @abstractmethod
    def _tokens(self, size: Size) -> int:
        """Tokens inside the encoder of a medium of `size`."""

    def _run(
        self,
        media: torch.Tensor | Sequence[torch.Tensor] | None,
        sizes: Sequence[Size],
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor:
        """What this stage makes of media of these sizes: `media` on the first stage, else `hidden_states` [R, H].

        Returns:
            Rows of one medium after the other: features on the last stage, [output tokens, width]; before it the tokens
            inside the encoder, [R, H].
        """
        groups = by_size(sizes)
        parts: torch.Tensor | Sequence[torch.Tensor]
        if self.is_first_stage:
            assert media is not None, "the first stage makes its output of media"
            parts = media
        else:
            assert hidden_states is not None, "a later stage makes its output of what the stage before gave"
            # Of one size they are cut without a copy.
            parts = (
                hidden_states.unflatten(0, (len(sizes), -1))
                if len(groups) == 1
                else hidden_states.split([self._tokens(size) for size in sizes])
            )
        if len(groups) == 1:
            (size,) = groups
            return self._stage(stacked(parts), size).flatten(0, 1)
        outputs: dict[int, torch.Tensor] = {}
        for size, members in groups.items():
            together = stacked([parts[member] for member in members])
            outputs |= zip(members, self._stage(together, size), strict=True)
        return torch.cat([outputs[member] for member in range(len(sizes))])

    def _stage(self, inputs: torch.Tensor, size: Size) -> torch.Tensor:
        """Media of one size through this stage: [N, ...] or hidden states [N, T, H] -> what they hand on, [N, rows,
        width]."""
        hidden_NTH = self._embed(inputs) if self.is_first_stage else inputs
        hidden_NTH = self._run_layers(hidden_NTH.transpose(0, 1).contiguous(), size).transpose(0, 1)
        return self._features(hidden_NTH, size) if self.is_last_stage else hidden_NTH

    def _layer_inputs(self, size: Size) -> dict[str, torch.Tensor | None]:
        """What every layer gets beside hidden states of media of `size`, by the names that a layer gives it."""
        return {"attention_mask": None}

    def _run_layers(self, hidden_TNH: torch.Tensor, size: Size) -> torch.Tensor:
        """The layers of this stage. With sequence parallelism they see T / tp tokens of every medium on each rank; all
        else, here and between stages, is whole on every rank."""
        inputs = self._layer_inputs(size)
        if not self.config.sequence_parallel:
            return self.layers(hidden_TNH, **inputs)
        own = scatter_to_sequence_parallel_region(hidden_TNH, group=self.tp_group)
        # The gradient of what follows is whole on every rank too: each takes its part of it, nothing is summed.
        return gather_from_sequence_parallel_region(
            self.layers(own, **inputs), tensor_parallel_output_grad=False, group=self.tp_group
        )


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
