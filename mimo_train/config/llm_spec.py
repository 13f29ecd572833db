"""Sizes of a language model, and their checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from encoders import key_rules
from mimo_train.config.errors import Fault
from mimo_train.config.keys import key, value_faults
from mimo_train.models.blocks.attention.spec import AttentionKeys
from mimo_train.models.blocks.base import Block, Layer
from mimo_train.models.blocks.delta.spec import DeltaKeys
from mimo_train.models.blocks.experts.spec import ExpertKeys
from mimo_train.models.blocks.latent.spec import Latent, LatentKeys
from mimo_train.models.blocks.rotary import RopeScaling

__all__ = ["MOST_LAYERS", "MOST_WIDTH", "LlmSpec", "RopeScaling"]

MOST_LAYERS, MOST_WIDTH = key_rules.MOST_LAYERS, key_rules.MOST_WIDTH
"""Maximum numbers of layers, and of heads and widths."""


@dataclass
class LlmSpec(ExpertKeys, DeltaKeys, LatentKeys, AttentionKeys):
    """Sizes of a decoder-only language model of Megatron-Core layers."""

    vocab_size: int = key(0, at_least=0, at_most=2**28, zero_means="as many as the tokenizer has tokens")
    """Rows of the embedding, padded to a multiple of 128; 0: as many as tokens. Rows beyond a `pretrained` model's are
    initialised."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(`hidden_size`), not features of media."""
    embedding_multiplier: float = key(1.0, above=0)
    """Multiply token embeddings, not features of media."""
    tie_embeddings: bool = True
    """The output layer shares the input embedding's weights."""
    logit_divisor: float = key(1.0, above=0)
    """Divide logits by this."""
    logit_softcap: float = key(0.0, at_least=0, zero_means="no cap")
    """Logits become cap * tanh(logit / cap); 0: no cap."""

    @property
    def head_width(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.kv_lora_rank else super().head_width

    @property
    def rotary_width(self) -> int:
        """Channels of a head that rotate."""
        return self.qk_rope_head_dim if self.kv_lora_rank else super().rotary_width

    def mixer(self, number: int) -> Block:
        """Return the block of a layer, counted from 0, that mixes tokens."""
        if number in self.linear_attention_layers:
            return self.delta()
        if not self.kv_lora_rank:
            return self.attention(number)
        return Latent(
            self.hidden_size,
            self.num_attention_heads,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
        )

    def layer(self, number: int) -> Layer:
        """Return a layer, counted from 0, as its blocks."""
        return Layer(
            self.hidden_size,
            self.mixer(number),
            self.experts() if self.has_experts(number) else self.mlp(),
            norm_vectors=self.norm_vectors,
            pre_norms=1 if self.parallel_block else 2 * self.pre_norms,
            post_norms=self.post_norms,
            dropout=self.dropout > 0,
        )

    def layers(self) -> list[Layer]:
        """Return all layers."""
        return [self.layer(number) for number in range(self.num_layers)]

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid sizes, alone and in combination; `prefix`: config key of this spec."""
        faults = list(value_faults(self, prefix))
        faults += self.rope_scaling.faults(f"{prefix}.rope_scaling", self.max_positions)
        yield from faults
        if faults:
            return  # divisibility is undefined for sizes below 1
        if self.zero_centered_norms and self.normalization != "RMSNorm":
            yield Fault(
                f"{prefix}.zero_centered_norms", f"requires RMSNorm, but {prefix}.normalization is {self.normalization}"
            )
        if not (self.pre_norms or self.post_norms):
            yield Fault(f"{prefix}.pre_norms", f"is false, and {prefix}.post_norms too. Set one of them")
        if self.parallel_block and (self.post_norms or not self.pre_norms):
            other = "post_norms" if self.post_norms else "pre_norms"
            yield Fault(f"{prefix}.parallel_block", f"is not supported with {prefix}.{other}={getattr(self, other)}")
        if not self.norm_bias and self.normalization != "LayerNorm":
            yield Fault(f"{prefix}.norm_bias", f"requires LayerNorm, but {prefix}.normalization is RMSNorm. Remove it")
        for name, other in (("embedding_multiplier", "scale_embeddings"), ("logit_divisor", "logit_softcap")):
            if getattr(self, name) != 1 and getattr(self, other):
                yield Fault(
                    f"{prefix}.{name}",
                    f"is not supported with {prefix}.{other} {getattr(self, other)}. Set one of them",
                )
        yield from self.latent_faults(prefix)
        if not self.kv_lora_rank:
            yield from self.attention_faults(prefix)
        yield from self.delta_faults(prefix)
        yield from self.mlp_faults(prefix)
        yield from self._layer_faults(prefix)
        yield from self.expert_faults(prefix)

    def _layer_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield faults of layer lists with invalid layers, or without effect."""
        needed = {"full_attention_layers": "window", "dense_layers": "num_experts"}
        needed |= dict.fromkeys(("linear_attention_layers", "no_rope_layers"), "")
        for name, other in needed.items():
            layers: list[int] = getattr(self, name)
            wrong = [layer for layer in layers if not 0 <= layer < self.num_layers]
            if wrong or len(set(layers)) < len(layers):
                yield Fault(
                    f"{prefix}.{name}",
                    f"must name layers from 0 to {self.num_layers - 1}, each once ({prefix}.num_layers is "
                    f"{self.num_layers}), is {layers}",
                )
            elif layers and other and not getattr(self, other):
                yield Fault(f"{prefix}.{name}", f"requires {prefix}.{other} above 0. Remove it")
