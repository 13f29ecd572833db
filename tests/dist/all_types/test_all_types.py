"""Types of transformers through the product, in the tier that docs/models.md shows: a few, or all of them on demand
(`MIMO_ALL_MODELS=1`, 30 minutes on two cores)."""

import os

import pytest

from tests.dist.all_types.flow import outcome
from tests.dist.ranks import run_ranks

ALL = bool(os.environ.get("MIMO_ALL_MODELS"))
BOUND = 1e-5
"""Largest difference of logits, of the largest, and of loss and gradient norm."""
FEW = {
    "cohere_compass_text": "rotary positions by kind of layer, a language model as it is",
    "gemma4": "images and audio next to a language model as it is, rows of audio that are padded",
    "granite_speech": "audio; batch norms, batches that are not those of their items",
    "hunyuan_vl": "positions of its class, on four axes",
    "idefics2": "images that are padded",
    "lfm2_vl": "a processor with an option of its own, a language model as it is",
    "llama4": "a projector outside of the tower",
    "molmo2": "tokens that see each other, a language model as it is, features that are added to embeddings",
    "nemotron_h_omni": "images and audio, an output layer inside the language model, buffers that files have",
}
"""Types that always run, and what is special."""
PACKAGES = {
    "fast_vlm": "timm", "gemma3n": "timm", "perception_lm": "timm", "smolvlm": "num2words",
}  # fmt: skip
"""Packages that processors and models of types need, which are no dependencies."""


def _types() -> list[str]:
    if not ALL:
        return sorted(FEW)
    from mimo_train.config.transformers_llm import causal_classes
    from scripts.model_tables import types_of_parts

    return sorted(causal_classes() | types_of_parts())


@pytest.mark.parametrize("kind", _types())
def test_a_type_is_trained_in_its_tier(kind, tmp_path):
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    (found,) = run_ranks(outcome, 1, kind, tmp_path)
    if isinstance(found, str):
        pytest.skip(f"not supported: {found}")
    assert found.keys == [] and found.same_ids
    assert found.logits < BOUND and found.resumed < BOUND and found.batched < BOUND
    assert found.tier == found.shown_tier
