"""Runs and layers with fp8 or compiled layers, and the weight copies of fp8."""

import pytest

from mimo_train.estimate import memory
from mimo_train.estimate.low_precision import fp8_weight_bytes
from mimo_train.inputs.padding import padding_of
from mimo_train.layout.kernels import fp8_text, row_unit
from mimo_train.layout.run import config_faults, resolve
from tests.unit.configs import load

FP8 = ("train.fp8=tensorwise", "train.precision=bf16")
LANGUAGE, IMAGES = "modules.language.", "modules.images."
TP_SP = (f"{LANGUAGE}layout.tp=2", f"{LANGUAGE}layout.sp=true")


def faults(*overrides: str, config: str = "vlm_digits") -> list[str]:
    return [str(fault) for fault in config_faults(load(config, *overrides))]


def test_sizes_that_are_multiples_have_no_fault():
    assert not faults(*FP8)
    assert not faults("train.fp8=blockwise", FP8[1])
    assert not faults("train.fp8=mxfp8", FP8[1])


MOE = ("llm@modules.language.llm=gpt_tiny_moe",)
REFUSED = {
    "precision": (("train.precision=fp16",), "train.fp8: tensorwise requires train.precision=bf16 (is fp16)"),
    "the CPU": (("run.device=cpu",), "run.device is cpu"),
    "adapters": ((f"{LANGUAGE}lora.rank=4",), "modules.language.lora.rank is 4, and adapters require torch's"),
    "capped scores": ((f"{LANGUAGE}llm.attention_softcap=50",), "attention_softcap requires torch's attention"),
    "a window over cp": ((f"{LANGUAGE}llm.window=8", f"{LANGUAGE}layout.cp=2"), "llm.window with layout.cp 2"),
    "windows of images": (("encoder@modules.images.encoder=qwen2_5_vl_vit", f"{IMAGES}projector.merge=2",
                             "data.sequence_length=2048"), "encoder has window attention"),
    "a width of experts": ((*MOE, f"{LANGUAGE}llm.expert_ffn_hidden_size=40"),
                           "llm.expert_ffn_hidden_size 40 over etp 1 is 40"),
    "a width of experts over etp": ((*MOE, *TP_SP, f"{LANGUAGE}layout.etp=2", "data.sequence_length=64",
                                     f"{LANGUAGE}llm.expert_ffn_hidden_size=48"),
                                    "llm.expert_ffn_hidden_size 48 over etp 2 is 24"),
    "a width of the shared expert": ((*MOE, f"{LANGUAGE}llm.shared_expert_ffn_hidden_size=56"),
                                     "llm.shared_expert_ffn_hidden_size 56 over tp 1 is 56"),
    "a width": ((f"{LANGUAGE}llm.ffn_hidden_size=200",), "llm.ffn_hidden_size 200 over tp 1 is 200"),
    "a width over tp": ((f"{IMAGES}layout.tp=4", f"{IMAGES}encoder.ffn_hidden_size=96"),
                        "encoder.ffn_hidden_size 96 over tp 4 is 24"),
    "a width for scales of 32": (("train.fp8=mxfp8", f"{IMAGES}encoder.ffn_hidden_size=80"),
                                 "multiples of 32 on each rank, got modules.images.encoder.ffn_hidden_size 80"),
    "rows of ranks": ((*TP_SP, "data.sequence_length=72"), "data.sequence_length: is 72;"),
    "tokens of ranks": ((f"{IMAGES}layout.tp=2", f"{IMAGES}layout.sp=true"),
                        "modules.images.layout.sp: with train.fp8 tensorwise each of tp 2 ranks needs"),
    "too many layers in bf16": (("train.num_layers_at_end_in_bf16=4",), "a stage of modules.images.encoder has 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_fp8_is_refused_with_the_key(name):
    overrides, words = REFUSED[name]
    found = faults(*FP8, *overrides)
    assert any(words in fault for fault in found), found


def test_delayed_scaling_is_refused_with_the_reason():
    for key in ("train.fp8", "modules.images.fp8"):
        assert any("is a pickle of" in fault for fault in faults(FP8[1], f"{key}=delayed"))


def test_layers_in_bf16_without_fp8_are_no_use():
    (fault,) = faults("train.num_layers_at_start_in_bf16=1")
    assert fault.startswith("train.num_layers_at_start_in_bf16: is 1, and no module has fp8")


def test_a_module_that_cannot_is_left_out_by_its_own_key():
    adapted = (f"{LANGUAGE}lora.rank=4", f"{LANGUAGE}fp8=none")
    assert not faults(*FP8, *adapted)
    assert fp8_text(load("vlm_digits", *FP8, *adapted)) == "layers in fp8: images tensorwise; all else in bf16"
    ends = ("train.num_layers_at_start_in_bf16=1", f"{LANGUAGE}fp8=blockwise")
    assert fp8_text(load("vlm_digits", *FP8, *ends)) == (
        "layers in fp8: images tensorwise, language blockwise, but for the first 1 and the last 0 of each; all else in "
        "bf16"
    )


def test_rows_of_sequence_parallel_ranks_are_whole_units():
    cfg = load("vlm_digits", *FP8, *TP_SP, "data.sequence_length=96")
    assert not config_faults(cfg) and row_unit(cfg) == 16
    assert padding_of(cfg).unit == 32
    assert padding_of(load("vlm_digits", *FP8)).unit == 8, "padded where they are multiplied"


def test_copies_of_weights_by_hand():
    sizes = (f"{LANGUAGE}llm.num_layers=3", f"{LANGUAGE}llm.hidden_size=96", f"{LANGUAGE}llm.ffn_hidden_size=192",
             f"{LANGUAGE}llm.num_attention_heads=6", f"{LANGUAGE}llm.num_query_groups=6",
             f"{LANGUAGE}llm.head_size=16")  # fmt: skip
    layer = 96 * (3 * 96) + 96 * 96 + 96 * (2 * 192) + 192 * 96
    cfg = load("vlm_digits", *FP8, *sizes)
    assert fp8_weight_bytes(cfg, "language", 0, tp=2, stages=1) == 3 * layer  # 2 bytes over tp 2
    first = load("vlm_digits", *FP8, *sizes, "train.num_layers_at_start_in_bf16=1")
    assert [fp8_weight_bytes(first, "language", stage, tp=1, stages=2) for stage in (0, 1)] == [2 * layer] * 2
    image = 64 * (4 * 64) + 2 * 64 * 256
    assert fp8_weight_bytes(cfg, "images", 0, tp=1, stages=1) == 2 * 3 * image
    assert fp8_weight_bytes(load("vlm_digits"), "images", 0, tp=1, stages=1) == 0


def test_copies_of_experts_by_hand():
    sizes = (*MOE, f"{LANGUAGE}llm.num_layers=3", f"{LANGUAGE}llm.hidden_size=96",
             f"{LANGUAGE}llm.num_attention_heads=6", f"{LANGUAGE}llm.ffn_hidden_size=192",
             f"{LANGUAGE}llm.expert_ffn_hidden_size=64", f"{LANGUAGE}llm.shared_expert_ffn_hidden_size=32",
             f"{LANGUAGE}llm.num_experts=8", f"{LANGUAGE}llm.dense_layers=[0]")  # fmt: skip
    cfg = load("vlm_digits", *FP8, *sizes)
    attention, dense = 96 * (3 * 96) + 96 * 96, 3 * 96 * 192
    shared, expert = 3 * 96 * 32, 3 * 96 * 64
    by_hand = 3 * attention // 2 + dense // 2 + 2 * (shared // 2 + 2 * expert // 2)
    # tp 2: two of eight experts on a rank, each over etp 2; the first layer has none.
    assert fp8_weight_bytes(cfg, "language", 0, tp=2, stages=1, ep=4, etp=2) == 2 * by_hand


def test_a_width_that_no_layer_has_is_not_looked_at():
    """The dense width, in a model whose layers all have experts."""
    sizes = (*FP8, *MOE, f"{LANGUAGE}llm.ffn_hidden_size=72", f"{LANGUAGE}llm.expert_ffn_hidden_size=64")
    assert not faults(*sizes)
    assert any("llm.ffn_hidden_size 72" in fault for fault in faults(*sizes, f"{LANGUAGE}llm.dense_layers=[0]"))


def test_the_estimate_counts_them():
    plain, fp8 = (
        memory.memory_of_stage(resolve(load("vlm_digits", "train.precision=bf16", *extra)), "language", 0, 256)
        for extra in ((), ("train.fp8=tensorwise",))
    )
    cfg = load("vlm_digits", *FP8)
    assert fp8.weights - plain.weights == fp8_weight_bytes(cfg, "language", 0, tp=1, stages=1) > 0
    assert fp8.activations == plain.activations


LANGUAGE, IMAGES = "modules.language.", "modules.images."
NOT_COMPILED = {
    "tensor parallel": ((f"{LANGUAGE}layout.tp=2",), "train.compile: layers is not", "modules.language.layout.tp is 2"),
    "adapters": ((f"{LANGUAGE}lora.rank=4",), "train.compile: layers is not", "lora.rank is 4"),
    "fp8": (("train.precision=bf16", f"{IMAGES}fp8=tensorwise"), "train.compile: layers is not", "fp8 (tensorwise"),
    "selective": ((f"{IMAGES}recompute=selective",), "train.compile: layers is not", "recompute=selective"),
    "weights that are waited for": (("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true"),
                                    "train.compile: layers is not", "optim.overlap_param_gather"),
    "experts": (("llm@modules.language.llm=gpt_tiny_moe",), "train.compile: layers is not", "llm.num_experts="),
    "dropout": ((f"{LANGUAGE}llm.dropout=0.1",), "train.compile: layers is not", "language.llm.dropout=0.1"),
    "dropout of an encoder": ((f"{IMAGES}encoder.dropout=0.1",), "train.compile: layers is not", "dropout in layers"),
    "by its own key": (("train.compile=none", f"{LANGUAGE}compile=layers", f"{LANGUAGE}layout.tp=2"),
                       "modules.language.compile: layers is not", "layout.tp is 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_layers_that_are_not_plain_are_refused(name):
    overrides, key, why = NOT_COMPILED[name]
    found = [str(fault) for fault in config_faults(load("vlm_digits", "train.compile=layers", *overrides))]
    assert any(fault.startswith(key) and why in fault for fault in found), found


def test_plain_layers_are_not():
    assert not config_faults(load("vlm_digits", "train.compile=layers", "train.recompute=full", "data.pack=true"))
    left_out = ("train.compile=layers", f"{LANGUAGE}layout.tp=2", f"{LANGUAGE}compile=none")
    assert not config_faults(load("vlm_digits", *left_out))
