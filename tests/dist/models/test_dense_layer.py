"""Layers that one rank computes in plain calls of torch: the numbers of Megatron-Core's, and its own layers wherever a
layer has more to do."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig

from mimo_train.cpu import attention
from mimo_train.models.dense_layer import NOTHING_TO_DO, DenseLayer
from mimo_train.models.parameters import modules_of
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

LLM, VIT = "modules.language.llm.", "modules.images.encoder."
ONE, KERNELS = "layout=one_process", "run.cpu_kernels=true"
GEMMA = (
    f"{LLM}num_query_groups=1",
    f"{LLM}head_size=12",
    f"{LLM}qkv_bias=true",
    f"{LLM}qk_norm=true",
    f"{LLM}zero_centered_norms=true",
    f"{LLM}window=6",
    f"{LLM}full_attention_layers=[1]",
    f"{LLM}local_rope_base=500",
    f"{LLM}rope_scaling.kind=yarn",
    f"{LLM}rope_scaling.factor=2",
    f"{LLM}rope_scaling.original_positions=32",
)
RUNS = {
    "the demo": (f"{LLM}num_query_groups=2",),
    "few key heads, norms, windows, two kinds of angles, yarn": GEMMA,
    "biases, LayerNorm, no gate": (f"{LLM}bias=true", f"{LLM}normalization=LayerNorm", f"{LLM}activation=gelu"),
    "images of all sizes": (f"{VIT}resize=native",),
    "packed rows": ("data.pack=true", "train.micro_batch_size=1"),
    "learned positions, recomputed in bf16": ("train.recompute=full", "train.precision=bf16", f"{LLM}position=learned"),
}


def _curves(cfg, plain: bool) -> tuple[list[tuple], int, int, int]:
    """(curve of three steps, layers that are computed here, calls of them, calls of `rotary_attention`)."""
    calls, attended, attend = [], [], attention.rotary_attention
    attention.rotary_attention = lambda *given: (attended.append(1), attend(*given))[1]
    compute = DenseLayer.__call__
    DenseLayer.__call__ = lambda *given, **options: (calls.append(1), compute(*given, **options))[1]
    if not plain:
        DenseLayer.of = classmethod(lambda cls, layer: None)
    run = Steps(cfg)
    curve = run.train(3)
    return curve, len(_dense(run)), len(calls), len(attended)


def _dense(run: Steps) -> list:
    chunks = [chunk for chunks in modules_of(run.session.model).values() for chunk in chunks]
    return [part for chunk in chunks for part in chunk.modules() if getattr(part, "_dense", None) is not None]


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_megatron_cores(name, digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, ONE, KERNELS, *RUNS[name])
    ((ours, layers, calls, attended),) = run_ranks(_curves, 1, cfg, True)
    ((theirs, *none),) = run_ranks(_curves, 1, cfg, False)
    assert layers == 3 and calls >= 3 * layers, "layers of both modules, in each of three steps"
    assert none == [0, 0, 0]
    assert name != "the demo" or attended, "rows of the length that the CPU's attention takes"
    assert max(largest_difference(whole([ours]), whole([theirs]))) < (1e-2 if "bf16" in name else 1e-6)


def _hooked(cfg) -> tuple[int, list[bool]]:
    run = Steps(cfg)
    layers = _dense(run)
    free = [layers[0]._dense.is_free]
    hook = layers[0].self_attention.linear_qkv.register_forward_hook(lambda *_: None)
    free.append(layers[0]._dense.is_free)
    hook.remove()
    free.append(layers[0]._dense.is_free)
    hook = layers[0].self_attention.core_attention.register_forward_pre_hook(lambda *_: None)
    free.append(layers[0]._dense.is_free)
    hook.remove()
    layers[0].mlp.forward = layers[0].mlp.forward  # another function in its place
    free.append(layers[0]._dense.is_free)
    return len(layers), free


@pytest.mark.parametrize(
    ("overrides", "ranks", "left"),
    [
        ((), 1, 3),
        ((f"{LLM}dropout=0.1",), 1, 1),
        ((f"{VIT}dropout=0.1",), 1, 2),
        (("modules.language.lora.rank=2",), 1, 1),
        (("train.recompute=selective",), 1, 0),
        ((f"{LLM}post_norms=true",), 1, 1),
        ((f"{LLM}num_experts=4", f"{LLM}experts_per_token=2", f"{LLM}dense_layers=[0]"), 1, 2),
        (("modules.language.layout.tp=2", "modules.images.layout.tp=2"), 2, 0),
    ],
)
def test_layers_with_more_to_do_are_megatron_cores(overrides, ranks, left, digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, ONE, KERNELS, *overrides)
    assert [layers for _, layers, *_ in run_ranks(_curves, ranks, cfg, True)] == [left] * ranks


def test_a_part_whose_call_somebody_waits_for_is_called(digits, tmp_path):
    ((layers, free),) = run_ranks(_hooked, 1, config("vlm_digits", tmp_path / "run", digits, ONE, KERNELS))
    assert layers == 3 and free == [True, False, True, False, False]


def _refused(cfg) -> list[str]:
    """Options with another value, at which a layer is Megatron-Core's."""
    # One that Megatron-Core calls otherwise would never be looked at.
    assert set(NOTHING_TO_DO) <= {field.name for field in fields(TransformerConfig)}
    layer = _dense(Steps(cfg))[0]
    refused = []
    for name, neutral in NOTHING_TO_DO.items():
        other = "local" if isinstance(neutral, str) else 2 if neutral is not False else True
        own = SimpleNamespace(**vars(layer.config) | {name: other})
        kept, layer.config = layer.config, own
        if DenseLayer.of(layer) is None:
            refused.append(name)
        layer.config = kept
    assert DenseLayer.of(layer) is not None and layer.self_attn_bda is get_bias_dropout_add
    return refused


def test_every_option_whose_work_is_left_out_is_refused(digits, tmp_path):
    ((refused),) = run_ranks(_refused, 1, config("vlm_digits", tmp_path / "run", digits, ONE, KERNELS))
    assert refused == list(NOTHING_TO_DO)


def test_rotation_made_without_gradients_are_not_those_of_training():
    angles = torch.rand(4, 1, 1, 6)
    layer = object.__new__(DenseLayer)
    layer._attention = SimpleNamespace(_yarn_concentration_factor=1.0)
    with torch.inference_mode():
        before = layer._rotation(angles, torch.float32)
    after = layer._rotation(angles, torch.float32)
    assert before[0].is_inference() and not after[0].is_inference()
    assert layer._rotation(angles, torch.float32) is after
