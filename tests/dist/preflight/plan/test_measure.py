"""Costs of layers, measured on the program's own modules."""

import pytest

from encoders.plain.spec import ImageSpec
from mimo_train.config.errors import UserError
from mimo_train.estimate.activations import BYTES, probability_activations
from mimo_train.preflight.plan.costs import read_profile
from tests.dist.ranks import run_ranks
from tests.unit.configs import load


class Plain(ImageSpec):
    """An encoder of a user, without layers of Megatron-Core."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // 8, width // 8

    def num_parameters(self) -> int:
        return 1


def _measured(cfg, most=1):
    import warnings

    from mimo_train.preflight.plan.measure import measure

    warnings.filterwarnings("ignore")
    try:
        return measure(cfg, 384, most)
    except UserError as error:
        return str(error)


def _counted(cfg, most):
    """A profile with floating point operations of the forward pass in the place of its seconds."""
    from mimo_train.preflight.dry_run.counts import Counts
    from mimo_train.preflight.plan import measure

    def counted(layers, inputs):
        with Counts(lambda tensor: False) as counts:
            layers(inputs)
        return float(counts.flops), 1.0

    measure._timed = counted
    return _measured(cfg, most)


def test_one_layer_of_each_module_is_measured(tmp_path):
    # What a run may have and a measurement must not mind: frozen parts, stages, shards that are not there.
    cfg = load("vlm_digits", "modules.images.freeze=[encoder]", "modules.language.layout.pp=2", "run.device=cpu",
               "modules.images.encoder.num_layers=3", "train.micro_batch_size=2", "data.demo=",
               "train.compile=layers", "train.num_layers_at_start_in_bf16=2")  # fmt: skip
    (profile,) = run_ranks(_measured, 1, cfg)
    profile.write(tmp_path / "costs.json")
    assert read_profile(tmp_path / "costs.json", ["images", "language"], "fp32") == profile
    costs = {cost.module: cost for cost in profile.layers}
    assert set(costs) == {"images", "language"} and profile.device == "the CPU"
    images, language = costs["images"], costs["language"]
    assert language.tokens == 2 * cfg.data.sequence_length
    assert images.tokens == 2 * cfg.modules["images"].encoder.most_inner_tokens(1)
    llm, length = cfg.llm, cfg.data.sequence_length
    weights = 4 * llm.hidden_size**2 + 3 * llm.hidden_size * llm.ffn_hidden_size
    assert language.forward_flops == 2 * (2 * weights * length + 2 * llm.hidden_size * length * (length + 1))
    for cost in costs.values():
        assert cost.backward_flops == 2 * cost.forward_flops
        assert cost.tp == 1 and 0 < cost.forward_seconds and 0 < cost.backward_seconds


def test_both_parts_of_a_joined_encoder_are_measured():
    parts = [f"modules.images.encoder.{part}.{size}" for part in ("first", "second")
             for size in ("hidden_size=32", "num_attention_heads=2", "ffn_hidden_size=64", "num_layers=2")]  # fmt: skip
    batch = ("data.sequence_length=1024", "train.micro_batch_size=2", "run.device=cpu")
    cfg = load("vlm_digits", "encoder@modules.images.encoder=clip_dinov2", *batch, *parts,
               "modules.images.encoder.first.feature_layer=-1")  # fmt: skip
    (profile,) = run_ranks(_measured, 1, cfg)
    (images,) = (cost for cost in profile.layers if cost.module == "images")
    assert images.tokens == 2 * sum(part.most_inner_tokens(1) for part in cfg.modules["images"].encoder.parts.values())
    assert 0 < images.forward_flops and 0 < images.forward_seconds


def test_an_encoder_without_layers_is_refused():
    cfg = load("vlm_digits")
    cfg.modules["images"].encoder = Plain(family="own:Plain")
    (said,) = run_ranks(_measured, 1, cfg)
    assert said.startswith("--measure: modules.images.encoder.family own:Plain") and "plain torch module" in said


def test_a_rank_of_several_has_its_part_of_a_layer():
    """At every tp that a module can have the layer computes what the profile says of it."""
    cfg = load("vlm_digits", "train.micro_batch_size=2", "run.device=cpu",
               "modules.images.encoder.num_attention_heads=4", "modules.language.llm.num_attention_heads=2",
               )  # fmt: skip
    (profile,) = run_ranks(_counted, 1, cfg, 8)
    assert [(cost.module, cost.tp) for cost in profile.layers] == [
        ("images", 1), ("language", 1), ("images", 2), ("language", 2), ("images", 4)
    ]  # fmt: skip
    length = cfg.data.sequence_length
    blocks = probability_activations(length, 1, 1) // BYTES["fp32"]  # whole blocks of queries, on one rank
    for cost in profile.layers:
        scores = (blocks if cost.tp == 1 else length**2) - length * (length + 1) / 2  # above those under the mask
        above = 2 * 4 * cfg.llm.query_width * scores / cost.tp if cost.module == "language" else 0
        assert cost.forward_seconds == pytest.approx(cost.forward_flops + above), cost
    assert profile.rates("language", 8) == profile.rates("language", 2)
