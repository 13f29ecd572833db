"""Targets of adapters: matches, errors, and parameters counted by hand."""

from dataclasses import replace

import pytest

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, is_adapter
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig
from mimo_train.estimate.flops import StepFlops
from mimo_train.estimate.memory import stage_memory
from mimo_train.estimate.parameters import module_parameters
from mimo_train.layout.adapters import WHOLE, adapted_linears, adapter_parameters
from mimo_train.layout.run import config_faults, resolve
from tests.unit.configs import changed, load

SPEC = LlmSpec(num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=20)
LORA = "modules.language.lora"


def faults(values: dict) -> dict[str, str]:
    return {fault.key: fault.message for fault in config_faults(changed(values))}


def adapted(*targets: str, **options) -> dict[str, tuple[str, ...]]:
    module = ModuleConfig(llm=SPEC, lora=LoraConfig(rank=3, targets=list(targets), **options))
    return {name: one.projections for name, one in adapted_linears(LANGUAGE, module, 8).items()}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        ({"num_experts": 4, "dense_layers": [1]}, ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        ({"num_experts": 4}, ["linear_qkv", "linear_proj"]),
        (
            {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "num_experts": 4},
            ["linear_q_proj", "linear_kv_up_proj", "linear_proj"],
        ),
        (
            {"linear_attention_layers": [0, 1], "num_experts": 4},
            ["in_proj", "linear_proj", "linear_qkv", "out_proj"],
        ),
    ],
)
def test_targets_are_by_default_the_linear_layers_of_the_blocks(keys, expected):
    module = ModuleConfig(llm=replace(SPEC, **keys), lora=LoraConfig(rank=3))
    names = {name.rpartition(".")[2] for name in adapted_linears(LANGUAGE, module, 8)}
    assert names == set(expected)


def numbers(*targets: str, dora: bool = False, **place) -> int:
    lora = LoraConfig(rank=3, dora=dora, **({"targets": list(targets)} if targets else {}))
    return sum(adapter_parameters(LANGUAGE, ModuleConfig(llm=SPEC, lora=lora), 8, **place))


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"modules.language.lora.rank": -1}, "modules.language.lora.rank", "at least 0"),
        ({"modules.language.lora.alpha": 0.0}, "modules.language.lora.alpha", "above 0"),
        ({"modules.language.lora.dropout": 1.0}, "modules.language.lora.dropout", "below 1"),
        ({f"{LORA}.targets": ["linear_q"]}, f"{LORA}.targets", "Did you mean linear_qkv"),
        (
            {f"{LORA}.targets": ["q_proj", "*.layers.[7-9].*"]},
            f"{LORA}.targets",
            "'*.layers.[7-9].*' matches no linear",
        ),
        ({f"{LORA}.targets": ["input_projections*"]}, f"{LORA}.targets", "matches no linear layer"),
        ({f"{LORA}.targets": []}, f"{LORA}.targets", "must name some"),
        (
            {f"{LORA}.targets": ["q_proj", "*.0.*.linear_qkv"]},
            f"{LORA}.targets",
            "named as a whole, and its q_proj too",
        ),
        ({f"{LORA}.dora": True, f"{LORA}.dropout": 0.1}, f"{LORA}.dropout", "is 0.1, and DoRA"),
        (
            {f"{LORA}.targets": ["linear_fc1", "q_proj"], "modules.language.llm.num_experts": 4},
            f"{LORA}.targets",
            "linear_fc1 belong to the 4 experts",
        ),
        (
            {f"{LORA}.targets": ["experts"], f"{LORA}.dora": True, "modules.language.llm.num_experts": 4},
            f"{LORA}.dora",
            "is not supported with adapters of experts",
        ),
        ({f"{LORA}.rank": 0, f"{LORA}.quantization": "nf4"}, f"{LORA}.quantization", "requires adapters"),
        ({f"{LORA}.quantization": "nf4"}, f"{LORA}.quantization", "has 96 inputs over 1 ranks. Use other sizes"),
        ({f"{LORA}.modules_to_save": ["norm"]}, f"{LORA}.modules_to_save", "must name some of embed_tokens, lm_head"),
        ({f"{LORA}.modules_to_save": ["lm_head"]}, f"{LORA}.modules_to_save", "which is tied to the embeddings"),
        (
            {"modules.images.lora.rank": 2, "modules.images.lora.modules_to_save": ["lm_head"]},
            "modules.images.lora.modules_to_save",
            "applies to native language models only",
        ),
        (
            {"modules.images.lora.rank": 2, "modules.images.freeze": ["encoder"]},
            "modules.images.freeze",
            "'encoder' freezes the adapters",
        ),
        (
            {f"{LORA}.modules_to_save": ["embed_tokens"], "modules.language.freeze": ["embedding.*"]},
            "modules.language.freeze",
            "'embedding.*' freezes embed_tokens",
        ),
        ({"modules.language.freeze": ["llm"]}, "modules.language.freeze", "adapters of modules.language.lora.rank 4"),
        (
            {"modules.language.llm.num_query_groups": 1, "modules.language.layout.tp": 2},
            "modules.language.layout.tp",
            "tp 2 does not divide the 1 key heads",
        ),
    ],
)
def test_impossible_adapters_are_refused(values, key, words):
    found = faults({"modules.language.lora.rank": 4} | values)
    assert words in found[key]


def test_a_frozen_encoder_may_have_adapters_in_its_projector():
    targets = {"modules.images.lora.rank": 2, "modules.images.lora.targets": ["input_projections*"]}
    assert not faults(targets | {"modules.images.freeze": ["encoder"]})
    assert "modules.images.freeze" in faults(targets | {"modules.images.freeze": ["projector"]})


def test_targets_name_layers_and_projections():
    attention, mlp = "decoder.layers.{}.self_attention.", "decoder.layers.{}.mlp."
    assert adapted("linear_fc2") == {f"{mlp.format(layer)}linear_fc2": (WHOLE,) for layer in range(3)}
    assert adapted("*.layers.[1-2].*linear_proj") == {f"{attention.format(n)}linear_proj": (WHOLE,) for n in (1, 2)}
    # In the order of the weight's rows. A pattern that matches the layer does not match its projections.
    assert adapted("v_proj", "q_proj")["decoder.layers.2.self_attention.linear_qkv"] == ("q_proj", "v_proj")
    assert set(adapted("*").values()) == {(WHOLE,)} and len(adapted("*")) == 12
    # Layers with one projection have a second name.
    assert adapted("o_proj", "down_proj") == adapted("linear_proj", "linear_fc2")
    assert adapted("*.0.mlp.up_proj") == {"decoder.layers.0.mlp.linear_fc1": ("up_proj",)}


def test_parameters_of_adapters_by_hand():
    # qkv 8 -> 8 + 2 * 4, projection 8 -> 8, gate and up 8 -> 40, down 20 -> 8.
    assert numbers() == 3 * 3 * ((8 + 16) + (8 + 8) + (8 + 40) + (20 + 8))
    # tp divides the split dimension: outputs of qkv and fc1, inputs of the other two.
    assert numbers(tp=2) == 3 * 3 * ((8 + 8) + (4 + 8) + (8 + 20) + (10 + 8))
    assert numbers("linear_proj", dora=True) == 3 * (3 * 16 + 8) and numbers("q_proj", dora=True, tp=2) == 3 * (36 + 4)
    # Each projection has its own A.
    assert numbers("q_proj", "v_proj", "gate_proj") == 3 * 3 * ((8 + 8) + (8 + 4) + (8 + 20))
    assert numbers("*.layers.2.*.q_proj", stage=1, stages=2) == 3 * 16 and not numbers("*.2.*", stage=0, stages=2)
    assert numbers("*.layers.1.*.q_proj", stage=1, stages=3) == numbers("*.layers.1.*.q_proj")


def test_experts_have_adapters_by_name_alone():
    experts = replace(SPEC, num_experts=4, expert_ffn_hidden_size=10, shared_expert_ffn_hidden_size=6)

    def of(*targets: str, **place) -> tuple[set[str], tuple[int, int]]:
        module = ModuleConfig(llm=experts, lora=LoraConfig(rank=3, targets=list(targets)))
        names = {name.partition(".mlp.")[2] for name in adapted_linears(LANGUAGE, module, 8)}
        return names, adapter_parameters(LANGUAGE, module, 8, **place)

    up, down = 8 + 20, 10 + 8
    assert of("experts") == ({"experts.linear_fc1", "experts.linear_fc2"}, (0, 3 * 4 * 3 * (up + down)))
    assert of("experts", ep=2)[1] == (0, 3 * 2 * 3 * (up + down))
    assert of("experts", tp=2, etp=2)[1] == (0, 3 * 4 * 3 * (8 + 10 + 5 + 8))
    assert of("*.experts.down_proj")[0] == {"experts.linear_fc2"}
    assert of("shared_experts") == (
        {"shared_experts.linear_fc1", "shared_experts.linear_fc2"}, (3 * 3 * (8 + 12 + 6 + 8), 0)
    )  # fmt: skip
    assert of("*")[0] == {""}, "attention alone"


def test_a_quantized_base_takes_fewer_bytes():
    sizes = [f"modules.language.llm.{name}=128" for name in ("hidden_size", "ffn_hidden_size")]
    sizes += ["modules.language.llm.num_attention_heads=4", f"{LORA}.rank=2", "train.precision=bf16"]
    full, packed = (
        stage_memory(resolve(load("gpt_tiny", *sizes, f"{LORA}.quantization={kind}")), LANGUAGE, 384)[0].memory
        for kind in ("''", "nf4")
    )
    cfg = load("gpt_tiny", *sizes)
    weights = cfg.llm.num_layers * (128 * 128 * 4 + 128 * 128 * 3)
    assert full.weights - packed.weights == weights * 2 - weights // 2 - weights // 64 * 4
    assert packed.work - full.work == 2 * 3 * 128 * 128


def test_saved_tables_are_trained():
    cfg = load("gpt_tiny", f"{LORA}.rank=2", f"{LORA}.modules_to_save=[embed_tokens]")
    width = cfg.llm.hidden_size
    for stage, tables in ((0, 1), (1, 0), (2, 1)):
        assert module_parameters(cfg, LANGUAGE, 384, stage=stage, stages=3)["llm"].trainable == tables * 384 * width
    assert module_parameters(cfg, LANGUAGE, 384, tp=2)["llm"].trainable == 192 * width


def test_chunks_of_a_stage_have_the_adapters_of_their_layers():
    module = ModuleConfig(llm=LlmSpec(num_layers=8, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8))
    module.lora = LoraConfig(rank=1, targets=["*.layers.[45].*.linear_proj"])
    # The first of two stages with two chunks each has layers 0, 1, 4 and 5.
    counts = [adapter_parameters(LANGUAGE, module, 8, stage=stage, stages=2, vpp=2) for stage in (0, 1)]
    assert counts == [(2 * 16, 0), (0, 0)]


def test_a_projector_with_adapters_is_frozen():
    cfg = load("vlm_digits", "modules.images.lora.rank=2", "modules.images.lora.targets=[q_proj, input_projections*]")
    images, last = module_parameters(cfg, "images", 128), module_parameters(cfg, "images", 128, stage=2, stages=3)
    assert images["projector"].trainable == 0 < images["projector"].total
    width, ffn = cfg.llm.hidden_size, cfg.modules["images"].projector.ffn_hidden_size or cfg.llm.hidden_size
    of_projector = 2 * (64 + ffn + ffn + width)
    assert images["adapters"].total == 3 * 2 * 2 * 64 + of_projector
    assert last["adapters"].total == 2 * 2 * 64 + of_projector


def test_gradients_go_back_to_the_first_adapter():
    step = {"texts": {1024: 1}, "counts": {}, "loads": {}, "pairs": {}, "step": 1}
    flops = []
    for layers in ("[0-9]", "[2-9]", "3"):
        cfg = load("gpt_tiny", f"{LORA}.rank=2", f"{LORA}.targets=['*.layers.{layers}.*linear_proj']")
        flops.append(StepFlops(cfg, 512)(**step)["language"].model)
    assert flops[0] > flops[1] > flops[2]


def test_names_of_adapters():
    assert is_adapter("decoder.layers.0.mlp.linear_fc1.up_proj.lora_a") and is_adapter("lora_magnitude")
    assert not is_adapter("decoder.lora_adapter.weight")
