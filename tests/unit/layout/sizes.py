"""Models whose numbers are counted by hand."""

import dataclasses

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.layout.run import Run, resolve
from tests.unit.configs import load

SMALL = LlmSpec(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16)
# One layer of SMALL: qkv 8 x 24, projection 8 x 8, gate and up 8 x 32, down 16 x 8, and two norms of 8.
SMALL_LAYER = 192 + 64 + 256 + 128 + 16

EXPERTS = dataclasses.replace(
    SMALL, num_experts=4, expert_ffn_hidden_size=12, shared_expert_ffn_hidden_size=6, shared_expert_gate=True
)
ONE_EXPERT = 8 * 24 + 12 * 8


def resolved(*overrides: str, config: str = "vlm_digits") -> Run:
    return resolve(load(config, *overrides))
