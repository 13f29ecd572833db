"""Parameters of models and their parts on a rank, by hand."""

from dataclasses import replace

import pytest

from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.whisper.spec import WhisperSpec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.estimate import parameters
from mimo_train.inputs.datasets import tokenizer_of
from tests.unit.configs import load
from tests.unit.layout.sizes import EXPERTS, ONE_EXPERT, SMALL, resolved


def test_parameters_of_experts_by_hand():
    # Attention and norms as in SMALL; router, shared expert (gate, up, down) and the vector of its gate.
    layer = 192 + 64 + 16 + 4 * 8 + 3 * 6 * 8 + 8
    assert parameters.language_parameters(EXPERTS, 10, 4) == 2 * layer + 8 + 10 * 8
    assert parameters.expert_parameters(EXPERTS) == 2 * 4 * ONE_EXPERT


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_head_has_one_row_in_place_of_the_output_layer(tied):
    spec = replace(SMALL, tie_embeddings=tied)
    counts = {head: parameters.language_parameters(spec, 10, 4, value_head=head) for head in (False, True)}
    assert counts[True] - counts[False] == 8 - (0 if tied else 10 * 8)
    stages = [parameters.language_parameters(spec, 10, 4, stage=at, stages=2, value_head=True) for at in range(2)]
    assert sum(stages) == counts[True]


def test_experts_are_dealt_and_cut_over_ranks():
    assert parameters.expert_parameters(EXPERTS, ep=2) == 2 * 2 * ONE_EXPERT
    assert parameters.expert_parameters(EXPERTS, ep=2, etp=2) == 2 * ONE_EXPERT * 2 // 2
    assert parameters.expert_parameters(EXPERTS, stage=1, stages=2) == 4 * ONE_EXPERT
    assert parameters.expert_parameters(SMALL) == 0


def test_parameters_of_an_encoder_over_tensor_parallel_ranks():
    encoder = VisionSpec(
        image_size=8, patch_size=4, hidden_size=8, num_layers=2, num_attention_heads=2, ffn_hidden_size=16
    )
    # Split, per layer: qkv 8 x 24 + 24, projection 8 x 8, up 8 x 16 + 16, down 16 x 8.
    divided = 2 * (192 + 24 + 64 + 128 + 16 + 128)
    # Whole: patches 48 x 8 + 8, positions 4 x 8, two biases and two norms per layer, the final norm.
    whole = 392 + 32 + 2 * (16 + 32) + 16
    assert parameters.encoder_parameters(encoder) == encoder.num_parameters() == divided + whole
    assert parameters.encoder_parameters(encoder, tp=2) == divided // 2 + whole


@pytest.mark.parametrize(("tp", "stages"), [(1, 2), (2, 3), (1, 4)])
def test_stages_of_an_encoder_have_its_parameters_between_them(tp, stages):
    encoder = VisionSpec(
        image_size=8, patch_size=4, hidden_size=8, num_layers=4, num_attention_heads=2, ffn_hidden_size=16
    )
    each = [parameters.encoder_parameters(encoder, tp=tp, stage=stage, stages=stages) for stage in range(stages)]
    assert sum(each) == parameters.encoder_parameters(encoder, tp=tp)
    # Patches and positions on the first stage, the final norm on the last.
    layer = (parameters.encoder_parameters(encoder, tp=tp) - 392 - 32 - 16) // 4
    first = 4 - (stages - 1) * (4 // stages)
    assert (each[0], each[-1]) == (392 + 32 + first * layer, 16 + 4 // stages * layer)


def test_parameters_of_projectors_over_tensor_parallel_ranks():
    mlp = ProjectorSpec(ffn_hidden_size=6)
    assert parameters.projector_parameters(mlp, 8, 4) == mlp.num_parameters(8, 4) == 8 * 6 + 6 + 6 * 4 + 4
    assert parameters.projector_parameters(mlp, 8, 4, tp=2) == (8 * 6 + 6 + 6 * 4) // 2 + 4
    linear = ProjectorSpec(kind="linear", merge=2)
    assert parameters.projector_parameters(linear, VisionSpec(hidden_size=8).joined_width(2), 4) == 32 * 4 + 4
    assert parameters.projector_parameters(linear, WhisperSpec(hidden_size=8).joined_width(2), 4) == 16 * 4 + 4


def test_freezing_takes_parts_and_leaves_patterns_uncounted():
    run = resolved('modules.images.freeze=[encoder,"*.bias"]')
    counts = parameters.module_parameters(run.cfg, "images", 384)
    assert counts["encoder"].trainable == 0 < counts["encoder"].total
    assert counts["projector"].trainable == counts["projector"].total
    assert parameters.freeze_patterns(run.cfg.modules["images"]) == ["*.bias"]


def test_vocabularies_are_padded():
    assert [parameters.padded_vocab_size(size) for size in (1, 128, 129, 320)] == [128, 128, 256, 384]


@pytest.mark.parametrize(("config", "ids"), [("gpt_tiny", 262), ("vlm_digits", 263), ("mixed_tiny", 264)])
def test_shipped_runs_keep_the_rows_of_their_embedding(config, ids):
    """Another number of rows would change initial weights and softmax."""
    size = tokenizer_of(load(config)).vocab_size
    assert (size, parameters.padded_vocab_size(size)) == (ids, 384)
