"""A layer of an encoder as the sum of its blocks."""

from encoders.base import GATED, LayeredSpec
from mimo_train.models.blocks.attention.spec import Attention
from mimo_train.models.blocks.base import Layer
from mimo_train.models.blocks.mlp.spec import Mlp


def encoder_layer(spec: LayeredSpec) -> Layer:
    """Return the layer of an encoder that is not joined of several."""
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    attention = Attention(
        hidden, heads, heads, hidden // heads, rope=spec.rotary_positions, qkv_bias=True, proj_bias=True
    )
    mlp = Mlp(hidden, spec.ffn_hidden_size, spec.activation == GATED, bias=True)
    return Layer(hidden, attention, mlp, scaled=spec.layer_scale > 0, dropout=spec.dropout > 0)
