"""Self-attention of language models whose layers turn queries and keys in ways of their own."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.rope import angles_of_layer, attention_factor


class RotaryAttention(SelfAttention):
    """`SelfAttention` with its layer's own rotary frequencies and attention factor; `config.llm` is the `LlmSpec`.

    Megatron-Core 0.19.2 gives all layers the same frequencies, and reads no attention factor from a config.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, layer_number: int, **options: Any):
        super().__init__(config, *arguments, layer_number=layer_number, **options)
        llm: LlmSpec = config.llm
        self.kind_of_angles = bool(llm.window_of(layer_number - 1)) if llm.local_rope_base else None
        """Of two kinds of layers, whether it is a local one; None where all layers turn alike."""
        self._yarn_concentration_factor = 1.0 if self.kind_of_angles else attention_factor(llm.rope_scaling)

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, rotary_pos_emb: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron-Core's. `rotary_pos_emb`: [S, 1, 1, angles], of all kinds of layers."""
        if rotary_pos_emb is not None:
            rotary_pos_emb = self.own_angles(rotary_pos_emb)
        return super().forward(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **options)

    def own_angles(self, angles: torch.Tensor) -> torch.Tensor:
        """Those of this layer, of all kinds of layers' [S, 1, 1, angles]."""
        return angles if self.kind_of_angles is None else angles_of_layer(angles, self.kind_of_angles)
