"""Media of many sizes in one pass of an encoder: outputs and gradients of one medium at a time, in every family whose
media keep their size; and how many operations a pass has."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.dist.ranks import run_ranks

BOUND = 1e-5
"""Largest difference, of the largest value that is expected."""
TINY = {"hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 20}
SMALL = {"image_size": 48, "max_pixels": 9000, "resize": "native", "patch_size": 8}
ENCODERS: dict[str, dict[str, Any]] = {
    "vit": SMALL | {"class_token": True},
    "clip": SMALL,
    "siglip": SMALL,
    "siglip2": {"patch_size": 8, "image_size": 40, "max_patches": 100},
    "dinov2": SMALL | {"register_tokens": 2, "position_size": 56},
    "dinov3": SMALL | {"register_tokens": 1},
    "qwen_vit": {"patch_size": 8, "window_size": 32, "full_attention": [1], "min_pixels": 100, "max_pixels": 9000},
    "qwen3_vit": SMALL | {"deepstack": [0, 1], "deepstack_width": 12, "merge_size": 2, "min_pixels": 100},
    "whisper": {"max_seconds": 0.9, "num_mels": 16},
    "qwen_audio": {"max_seconds": 0.9, "num_mels": 16},
}
MERGE = {"siglip2": 2, "qwen_vit": 2, "qwen3_vit": 2}
SIZES = 16


WAYS: dict[str, dict[str, Any]] = {
    "trained": {},
    "recomputed": {"train": {"recompute": "full"}},
    "attention recomputed": {"train": {"recompute": "selective"}},
    "adapted": {"module": {"lora": {"rank": 2}}},
}
CASES = [(name, "trained") for name in ENCODERS]
CASES += [(name, way) for name in ("dinov2", "qwen_vit", "qwen3_vit") for way in WAYS if way != "trained"]
SPLIT_CASES = [("siglip2", "trained"), ("siglip2", "adapted"), ("qwen_vit", "recomputed"), ("qwen3_vit", "trained")]
SPLIT_CASES += [("whisper", "trained")]
"""Of tokens that sequence parallelism cuts into two."""


def test_media_of_many_sizes_are_as_one_at_a_time():
    (errors,) = run_ranks(_compare_all, 1, CASES, False)
    assert not {case: error for case, error in zip(CASES, errors, strict=True) if not error < BOUND}


def test_media_of_many_sizes_are_as_one_at_a_time_with_sequence_parallelism():
    for errors in run_ranks(_compare_all, 2, SPLIT_CASES, True):
        assert not {case: error for case, error in zip(SPLIT_CASES, errors, strict=True) if not error < BOUND}


def test_the_number_of_operations_does_not_grow_with_the_number_of_sizes():
    """Of a device that has a kernel for attention inside documents. Clips are embedded by their length."""
    (counted,) = run_ranks(_count_all, 1)
    for name, (two, four, sixteen) in counted.items():
        assert two.total() > 50 and two == four == sixteen, name


def test_dropout_is_that_of_every_image():
    """Hidden states and attention drop in a packed row too, by the call of each image; not in an evaluation."""
    (found,) = run_ranks(_with_dropout, 1)
    assert found == {"differ": True, "calls": {0.25}, "same in an evaluation": True}


def _spec(name: str) -> Any:
    from encoders.registry import FAMILIES

    spec = FAMILIES[name].spec(**TINY | ENCODERS[name])
    assert spec.sizes_vary and not spec.faults() + spec.joint_faults(MERGE.get(name, 1))
    return spec


def _encoder(name: str, way: dict[str, Any], layout: Any, groups: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from encoders.projectors.spec import ProjectorSpec
    from encoders.registry import FAMILIES
    from mimo_train.config.llm_spec import LlmSpec
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import LoraConfig, ModuleConfig
    from mimo_train.models.freeze import let_recomputed_layers_learn
    from mimo_train.models.layers import layer_spec
    from mimo_train.models.lora.adapters import freeze_base
    from mimo_train.models.norms import norm_class
    from mimo_train.models.transformer_config import encoder_config

    spec, keys = _spec(name), way.get("module", {})
    merge = MERGE.get(name, 2 if layout.sp else 1)
    module = ModuleConfig(encoder=spec, projector=ProjectorSpec(merge=merge), lora=LoraConfig(**keys.get("lora", {})))
    cfg = ConfigContainer(modules={"images": module, "language": ModuleConfig(llm=LlmSpec())})
    for key, value in way.get("train", {}).items():
        setattr(cfg.train, key, value)
    config = encoder_config(cfg, layout)
    layers = layer_spec(config, AttnMaskType.no_mask, False)
    encoder = FAMILIES[name].load()(config, spec, layers, norm_class(False), merge, groups)
    if module.lora.rank:
        freeze_base([encoder], "*")
        for parameter_name, parameter in encoder.named_parameters():
            if "lora_b" in parameter_name:  # they start at zero
                parameter.data.normal_(std=0.1)
    if cfg.train.recompute == "full":
        let_recomputed_layers_learn([encoder])
    return encoder


def _media(encoder: Any) -> list[Any]:
    """Of so many sizes, two of the first one."""
    import torch

    torch.manual_seed(5)
    spec = encoder.spec
    if spec.kind == "image":
        extents = ((16 * (1 + at % 7), 16 * (1 + 3 * at % 11)) for at in range(77))
    else:
        extents = ((700 + 640 * at, spec.sample_rate) for at in range(20))
    sizes = list(dict.fromkeys(spec.input_size(*extent, merge=encoder.merge) for extent in extents))[:SIZES]
    assert len(sizes) == SIZES
    media = []
    for size in (*sizes, sizes[0]):
        whole = (torch.rand(3, *size) * 256).to(torch.uint8) if spec.kind == "image" else torch.randn(size[0])
        media.append(whole)
    return media


@contextmanager
def _one_process_or_two(sp: bool) -> Iterator[tuple[Any, Any]]:
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    torch.set_num_threads(1)
    devices.install("cpu")
    devices.init_process_group("cpu", 60.0)
    ranks = 1 + sp
    layout = ModuleLayout(name="images", tp=ranks, pp=1, dp=1, cp=1, ep=1, sp=sp, first_rank=0)
    groups = build_groups(RunLayout({"images": layout}, (), tuple(range(ranks)))).collections["images"]
    model_parallel_cuda_manual_seed(1, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=0)
    yield layout, groups


def _compare_all(cases: list[tuple[str, str]], sp: bool) -> list[float]:
    with _one_process_or_two(sp) as (layout, groups):
        return [_compare(_encoder(name, WAYS[way], layout, groups)) for name, way in cases]


def _compare(encoder: Any) -> float:
    import torch
    import torch.distributed as dist

    media = _media(encoder)
    outputs, gradients = [], []
    for parts in ([media], [[one] for one in media]):
        encoder.zero_grad()
        with _counted_layer_calls(encoder) as calls:
            outputs.append(torch.cat([encoder(part) for part in parts]))
        assert len(calls) == len(parts)
        torch.manual_seed(6)
        (outputs[-1] * torch.rand_like(outputs[-1])).sum().backward()
        learned = [one for one in encoder.parameters() if one.requires_grad]
        for one in learned:
            if getattr(one, "sequence_parallel", False):
                dist.all_reduce(one.grad, group=encoder.tp_group)
        gradients.append([one.grad for one in learned])
    assert gradients[0], "something learns"
    largest = max(float(one.abs().max()) for one in gradients[1])
    errors = [float((one - other).abs().max()) / largest for one, other in zip(*gradients, strict=True)]
    return max(_difference(*outputs), *errors)


@contextmanager
def _counted_layer_calls(encoder: Any) -> Iterator[list[int]]:
    calls: list[int] = []
    hook = encoder.layers.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


def _difference(one: Any, other: Any) -> float:
    return float((one - other).detach().abs().max() / other.detach().abs().max())


def _count_all() -> dict[str, tuple[Counter[str], ...]]:
    from unittest.mock import patch

    import torch

    from mimo_train.models import attention

    def kernel(query, key, value, *_, **__):
        return torch.addcmul(query, key, value)

    with (
        _one_process_or_two(False) as (layout, groups),
        patch.object(attention.SdpaAttention, "_has_kernel", lambda self, query: True),
        patch.object(attention, "varlen_attn", kernel),
    ):
        found = {}
        for name in (name for name in ENCODERS if name not in ("whisper", "qwen_audio")):
            encoder = _encoder(name, {}, layout, groups).to("meta")
            sizes = [tuple(one.shape[-2:]) for one in _media(encoder)[:SIZES]]
            found[name] = tuple(
                _operations(encoder, [sizes[at * count // SIZES] for at in range(SIZES)]) for count in (2, 4, SIZES)
            )
        return found


def _operations(encoder: Any, sizes: list[tuple[int, int]]) -> Counter[str]:
    """Operations of a device, forward and backward, without those that give another view of their input."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
            on_device = any(
                isinstance(one, torch.Tensor) and one.is_meta for one in (out if isinstance(out, tuple) else (out,))
            )
            found[func.name()] += on_device and not is_view
            return out

    pixels = [torch.empty(3, *size, dtype=torch.uint8, device="meta") for size in sizes]
    found: Counter[str] = Counter()
    encoder.zero_grad()
    with Count():
        encoder(pixels).sum().backward()
    return +found


def _with_dropout() -> dict[str, Any]:
    from unittest.mock import patch

    import torch

    original, calls = torch.nn.functional.scaled_dot_product_attention, []

    def noted(*arguments, dropout_p, **options):
        calls.append(dropout_p)
        return original(*arguments, dropout_p=dropout_p, **options)

    with _one_process_or_two(False) as (layout, groups), patch.dict(ENCODERS, vit=ENCODERS["vit"] | {"dropout": 0.25}):
        encoder = _encoder("vit", {}, layout, groups)
        media = _media(encoder)
        with patch.object(torch.nn.functional, "scaled_dot_product_attention", noted):
            one, other = encoder(media), encoder(media)
        encoder.eval()
        still = [encoder(media), torch.cat([encoder([each]) for each in media])]
        return {
            "differ": not torch.allclose(one, other, atol=1e-2),
            "calls": set(calls),
            "same in an evaluation": _difference(*still) < BOUND,
        }
