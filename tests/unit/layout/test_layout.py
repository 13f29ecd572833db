"""Layout arithmetic: ranks, batches, and every fault with its numbers."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders.native.vit.patch_spec import VisionSpec
from mimo_train.config.errors import ConfigError
from mimo_train.config.schema_modules import LayoutConfig, LoraConfig, ModuleConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.layout import ranks
from mimo_train.layout.decoding import require_decodable
from mimo_train.layout.legality import fsdp_faults
from mimo_train.layout.run import config_faults, layout_faults, resolve
from tests.unit.configs import changed, load


def faults(cfg) -> list[tuple[str, str]]:
    return [(fault.key, fault.message) for fault in config_faults(cfg)]


def arranged(language: dict, batch: tuple[int, int] = (32, 8), mode: str = "disjoint", first=None, **encoders: dict):
    """Return the digits run with these layouts; each keyword is an encoder module."""
    cfg = load("vlm_digits")
    images = cfg.modules.pop("images")
    cfg.modules = {name: copy.deepcopy(images) for name in encoders} | {"language": cfg.language}
    for name, sizes in {**encoders, "language": language}.items():
        cfg.modules[name].layout = LayoutConfig(**sizes)
    cfg.train.global_batch_size, cfg.train.micro_batch_size = batch
    cfg.placement.mode, cfg.placement.first_rank = mode, first or {}
    return cfg


def test_disjoint_modules_stand_one_after_the_other():
    plan = resolve(arranged({"tp": 2, "pp": 2}, images={"dp": 2}, sounds={"tp": 2})).layout
    assert {name: list(sizes.ranks) for name, sizes in plan.modules.items()} == {
        "images": [0, 1],
        "sounds": [2, 3],
        "language": [4, 5, 6, 7],
    }
    assert plan.world_size == 8
    assert plan.on_rank(1) == ["images"] and plan.on_rank(7) == ["language"]


def test_first_ranks_place_modules_in_any_order():
    plan = resolve(arranged({"dp": 2}, first={"images": 2, "language": 0}, images={})).layout
    assert list(plan.modules["images"].ranks) == [2]
    assert list(plan.language.ranks) == [0, 1]
    assert plan.world_size == 3


def test_shared_modules_stand_on_all_ranks():
    plan = resolve(arranged({"tp": 2, "dp": 2}, mode="shared", images={"tp": 2, "dp": 2})).layout
    assert plan.world_size == 4
    assert [plan.on_rank(rank) for rank in range(4)] == [["images", "language"]] * 4


def test_one_microbatch_is_the_micro_batch_of_every_language_replica():
    batch = resolve(arranged({"dp": 2}, batch=(48, 4), images={"dp": 4})).batch
    assert (batch.microbatch_samples, batch.num_microbatches) == (8, 6)


def test_layouts_describe_themselves():
    plan = resolve(arranged({"tp": 2, "pp": 2, "sp": True}, images={})).layout
    assert str(plan.language) == "tp2 pp2 sp"
    assert str(plan.modules["images"]) == "one rank"


LANGUAGE, IMAGES, FIRST = "modules.language", "modules.images", "placement.first_rank"
SHARED = {"placement.mode": "shared"}


@pytest.mark.parametrize(
    ("values", "key", "numbers"),
    [
        ({f"{LANGUAGE}.layout.tp": 3}, f"{LANGUAGE}.layout.tp", ["tp 3", "num_attention_heads 4"]),
        (
            {
                f"{LANGUAGE}.layout.tp": 3,
                f"{LANGUAGE}.llm.num_query_groups": 2,
                f"{LANGUAGE}.llm.num_attention_heads": 6,
            },
            f"{LANGUAGE}.layout.tp",
            ["tp 3", "num_query_groups 2"],
        ),
        ({f"{LANGUAGE}.layout.pp": 5}, f"{LANGUAGE}.layout.pp", ["pp 5", "4 layers"]),
        ({f"{IMAGES}.layout.dp": 3}, f"{IMAGES}.layout.dp", ["dp 3", "microbatch of 8 samples"]),
        ({"train.global_batch_size": 20}, "train.global_batch_size", ["20 samples", "microbatches of 8"]),
        (
            {f"{LANGUAGE}.layout.dp": 3},
            "train.global_batch_size",
            ["32 samples", "microbatches of 24", "train.micro_batch_size 8", "dp 3"],
        ),
        ({"train.iters": 0}, "train.iters", ["is 0", "train.epochs"]),
        ({f"{LANGUAGE}.layout.sp": True}, f"{LANGUAGE}.layout.sp", ["tp > 1", "tp is 1"]),
        (
            {f"{IMAGES}.layout.sp": True, f"{IMAGES}.layout.tp": 2, f"{IMAGES}.encoder.class_token": True},
            f"{IMAGES}.layout.sp",
            ["17 tokens", "tp 2", "class_token"],
        ),
        (
            {f"{IMAGES}.layout.sp": True, f"{IMAGES}.layout.tp": 2, f"{IMAGES}.encoder.resize": "native"},
            f"{IMAGES}.layout.sp",
            ["any size have multiples of 1 tokens", "projector.merge"],
        ),
        ({f"{IMAGES}.layout.pp": 4}, f"{IMAGES}.layout.pp", ["pp 4", "3 layers", "each stage needs one"]),
        ({f"{LANGUAGE}.layout.ep": 2}, f"{LANGUAGE}.layout.ep", ["ep is 2", "num_experts is 0"]),
        ({f"{IMAGES}.layout.ep": 2}, f"{IMAGES}.layout.ep", ["no experts", "is 2"]),
        (
            {f"{LANGUAGE}.layout.cp": 2, "data.sequence_length": 98},
            "data.sequence_length",
            ["98 tokens", "4 equal chunks", f"{LANGUAGE}.layout.cp 2", "multiple of 4"],
        ),
        (
            {
                f"{LANGUAGE}.layout.cp": 3,
                f"{LANGUAGE}.layout.tp": 4,
                f"{LANGUAGE}.layout.sp": True,
                "data.sequence_length": 102,
            },
            "data.sequence_length",
            ["102 tokens", "2 x cp 3 x tp 4", "multiple of 24", "set sp to false"],
        ),
        (
            {
                f"{LANGUAGE}.llm.{key}": value
                for key, value in (("num_attention_heads", 5), ("num_query_groups", 0), ("head_size", 0))
            },
            f"{LANGUAGE}.llm.num_attention_heads",
            ["5", "hidden_size 96"],
        ),
        ({f"{IMAGES}.encoder.patch_size": 7}, f"{IMAGES}.encoder.patch_size", ["7", "image_size 48"]),
        ({f"{IMAGES}.projector.merge": 3}, f"{IMAGES}.projector.merge", ["3", "4 x 4"]),
        ({"placement.mode": "stacked"}, "placement.mode", ["'stacked'"]),
        ({FIRST: {"images": 0}}, FIRST, ["language"]),
        ({FIRST: {"images": 0, "language": 1, "sounds": 2}}, f"{FIRST}.sounds", ["images, language"]),
        (
            {f"{IMAGES}.layout.dp": 2, FIRST: {"images": 0, "language": 1}},
            f"{FIRST}.images",
            ["images has 2 ranks (0-1)", "of language 1 (1)", "tp x dp 1"],
        ),
        ({FIRST: {"images": 0, "language": 3}}, FIRST, ["rank 1", "2 idle of 4", "language from rank 3 to 1"]),
        (
            {f"{LANGUAGE}.layout.tp": 2, "placement.ranks_per_node": 2, FIRST: {"images": 0, "language": 1}},
            f"{LANGUAGE}.layout.tp",
            ["ranks 1-2", "nodes of 2", "multiple of 2 with placement.first_rank", "tp_across_nodes"],
        ),
        (
            {**SHARED, f"{LANGUAGE}.layout.dp": 2, f"{IMAGES}.layout.tp": 2, f"{LANGUAGE}.llm.dropout": 0.1},
            f"{LANGUAGE}.layout",
            ["dropout", "images (tp 2, dp 1)", "language 0.1"],
        ),
        (
            {**SHARED, f"{LANGUAGE}.layout.dp": 2},
            f"{IMAGES}.layout",
            ["1 rank (0)", "of language 2 (0-1)", "tp x dp 2"],
        ),
        ({**SHARED, FIRST: {"images": 0, "language": 0}}, FIRST, ["shared"]),
        ({f"{IMAGES}.balance": "pixels"}, f"{IMAGES}.balance", ["samples or images", "'pixels'"]),
        ({"modules.sounds": ModuleConfig()}, "modules.sounds.encoder", ["missing"]),
        ({f"{IMAGES}.projector": None}, f"{IMAGES}.projector", ["missing"]),
        ({f"{LANGUAGE}.llm": None}, f"{LANGUAGE}.llm", ["llm@modules.language.llm=gpt_tiny"]),
        ({f"{LANGUAGE}.encoder": VisionSpec()}, f"{LANGUAGE}.encoder", ["remove"]),
        ({"modules": {}}, "modules", ["'language'", "none"]),
    ],
)
def test_faults_name_the_key_and_the_numbers(values, key, numbers):
    found = faults(changed(values))
    assert [text for fault_key, text in found if fault_key == key and all(number in text for number in numbers)], found


INTERLEAVED = {f"{LANGUAGE}.layout.pp": 2, f"{LANGUAGE}.layout.vpp": 2, "train.micro_batch_size": 4}
EXPERTS = {f"{LANGUAGE}.llm.num_experts": 4, f"{LANGUAGE}.llm.expert_ffn_hidden_size": 64}
OVER_HEADS = {f"{LANGUAGE}.llm.qk_norm": True, f"{LANGUAGE}.llm.qk_norm_over_heads": True}


@pytest.mark.parametrize(
    ("values", "key", "numbers"),
    [
        ({f"{LANGUAGE}.layout.vpp": 2}, f"{LANGUAGE}.layout.vpp", ["vpp 2", "pp is 1"]),
        ({**INTERLEAVED, f"{LANGUAGE}.llm.num_layers": 6}, f"{LANGUAGE}.layout.vpp", ["6 layers", "4 chunks"]),
        (
            {**INTERLEAVED, "train.global_batch_size": 12},
            "train.global_batch_size",
            ["3 microbatches of 4", "multiple of pp 2", "multiple of 8"],
        ),
        ({**EXPERTS, f"{LANGUAGE}.layout.ep": 3, f"{LANGUAGE}.layout.dp": 3}, f"{LANGUAGE}.layout.ep", ["3", "4"]),
        ({**EXPERTS, f"{LANGUAGE}.layout.ep": 2}, f"{LANGUAGE}.layout.ep", ["ep 2 x etp 1", "1 rank of a stage"]),
        (
            {f"{LANGUAGE}.llm.num_query_groups": 1, **OVER_HEADS, f"{LANGUAGE}.layout.tp": 2},
            f"{LANGUAGE}.layout.tp",
            ["tp 2", "num_query_groups 1"],
        ),
        (
            {**EXPERTS, f"{LANGUAGE}.llm.bias": True, f"{LANGUAGE}.layout.etp": 2, f"{LANGUAGE}.layout.dp": 2},
            f"{LANGUAGE}.layout.etp",
            ["biases of experts", "is 2"],
        ),
        (
            {**EXPERTS, f"{LANGUAGE}.layout.etp": 3, f"{LANGUAGE}.layout.dp": 3},
            f"{LANGUAGE}.layout.etp",
            ["etp 3", "width 64"],
        ),
        ({**EXPERTS, f"{LANGUAGE}.layout.tp": 2}, f"{LANGUAGE}.layout.sp", ["tp 2", "sequence parallel"]),
        (
            {**EXPERTS, f"{LANGUAGE}.llm.shared_expert_ffn_hidden_size": 33, f"{LANGUAGE}.layout.tp": 2},
            f"{LANGUAGE}.layout.tp",
            ["tp 2", "shared_expert_ffn_hidden_size 33"],
        ),
        ({**EXPERTS, f"{LANGUAGE}.llm.experts_per_token": 5}, f"{LANGUAGE}.llm.experts_per_token", ["4", "is 5"]),
        ({**EXPERTS, f"{LANGUAGE}.llm.shared_expert_gate": True}, f"{LANGUAGE}.llm.shared_expert_gate", ["is 0"]),
    ],
)
def test_faults_of_a_language_model_alone(values, key, numbers):
    found = faults(changed(values, "gpt_tiny"))
    assert [text for fault_key, text in found if fault_key == key and all(number in text for number in numbers)], found


@pytest.mark.parametrize(
    "values",
    [
        INTERLEAVED,
        {**EXPERTS, f"{LANGUAGE}.layout.dp": 2, f"{LANGUAGE}.layout.ep": 2},
        {**EXPERTS, f"{LANGUAGE}.layout.tp": 2, f"{LANGUAGE}.layout.sp": True, f"{LANGUAGE}.layout.etp": 2},
        {**EXPERTS, f"{LANGUAGE}.llm.ffn_hidden_size": 191, f"{LANGUAGE}.layout.dp": 2},
    ],
)
def test_legal_layouts_of_a_language_model_alone(values):
    assert faults(changed(values, "gpt_tiny")) == []


def test_a_stage_replicates_experts_over_what_they_do_not_divide():
    cfg = changed({**EXPERTS, f"{LANGUAGE}.layout.dp": 4, f"{LANGUAGE}.layout.ep": 2}, "gpt_tiny")
    cfg.train.micro_batch_size = 4
    assert resolve(cfg).layout.language.expert_dp == 2
    assert str(resolve(cfg).layout.language) == "dp4 ep2"


def test_plan_raises_every_fault_at_once():
    with pytest.raises(ConfigError) as raised:
        resolve(changed({f"{LANGUAGE}.layout.tp": 3, f"{IMAGES}.encoder.patch_size": 7}))
    keys = {fault.key for fault in raised.value.faults}
    assert keys == {f"{LANGUAGE}.layout.tp", f"{IMAGES}.encoder.patch_size"}


@given(dp=st.integers(1, 8), encoder_dp=st.integers(1, 8), micro=st.integers(1, 12), total=st.integers(1, 200))
def test_a_batch_is_legal_exactly_when_every_rank_gets_whole_samples(dp, encoder_dp, micro, total):
    cfg = arranged({"dp": dp}, (total, micro), images={"dp": encoder_dp})
    whole = total % (micro * dp) == 0 and micro * dp % encoder_dp == 0
    assert (not list(layout_faults(cfg))) == whole


@pytest.mark.parametrize(
    ("layers", "stages", "each"), [(4, 2, [2, 2]), (3, 2, [2, 1]), (7, 3, [3, 2, 2]), (5, 5, [1] * 5)]
)
def test_stages_share_the_layers_and_the_first_takes_what_is_left(layers, stages, each):
    assert [ranks.layers_of_stage(layers, stage, stages) for stage in range(stages)] == each


def test_native_modules_are_not_sharded():
    cfg = arranged({"dp": 2, "fsdp": True}, images={"dp": 2, "fsdp": True})
    found = dict(faults(cfg))
    for name in ("images", "language"):
        assert found[f"modules.{name}.layout.fsdp"].startswith("is true, which requires a class of transformers")


def test_options_that_need_whole_weights_are_named():
    lora = LoraConfig(rank=2, dora=True)
    module = ModuleConfig(llm=TransformersLlm(), layout=LayoutConfig(dp=2, fsdp=True), lora=lora)
    module.prefetch_microbatches = 2
    reasons = " ".join(fault.message for fault in fsdp_faults(module, "modules.language"))
    assert "lora.dora" in reasons and "prefetch_microbatches" in reasons and "class of transformers" not in reasons
    module.layout.fsdp = False
    assert not [*fsdp_faults(module, "modules.language")]
    whole = ranks.ModuleLayout("language", tp=1, pp=1, dp=2, cp=1, ep=1, sp=False, first_rank=0, fsdp=True)
    with pytest.raises(ConfigError, match="generated by whole replicas"):
        require_decodable(ranks.RunLayout({"language": whole}, (), (0, 1)))
