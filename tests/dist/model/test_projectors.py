"""Projectors: what is adapted from Megatron-Core, and whether it still has to be."""

import inspect

from tests.dist.ranks import run_ranks


def _projector_leaves_its_bias_in_parts() -> bool:
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector

    return "skip_bias_add=True" in inspect.getsource(MultimodalProjector.__init__)


def test_linear_projectors_still_need_a_layer_of_ours():
    assert run_ranks(_projector_leaves_its_bias_in_parts, 1) == [True], "see mimo_train.model.layers._gathered_linear"
