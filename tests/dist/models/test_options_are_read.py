"""Every key of an encoder, a projector and a language model is read where the model is built and runs, or refused: none
is ignored."""

import dataclasses
from typing import Any

import pytest

from encoders.projectors.spec import ProjectorSpec, ResamplerSpec
from encoders.registry import FAMILIES
from mimo_train.config.llm_spec import LlmSpec
from tests.dist.models.test_language_options import BIASES, DELTA, EXPERTS, LATENT, OPTIONS
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

NAMES = {"name", "family", "path", "pad"}
"""What says nothing of the model, or picks its code; and how the directory of Qwen-VL reads videos."""
DOCUMENTED = {"max_positions"}
"""Read by the checks of a run alone, as its description says."""
TINY = {"hidden_size": 24, "num_layers": 2, "num_attention_heads": 2, "ffn_hidden_size": 20}
ENCODERS: dict[str, list[dict[str, Any]]] = {
    "vit": [{"image_size": 32}, {"image_size": 32, "resize": "native"}],
    "clip": [{"image_size": 32}, {"image_size": 32, "resize": "native"}],
    "siglip": [{"image_size": 32}, {"image_size": 32, "resize": "native"}],
    "siglip2": [{"patch_size": 8, "max_patches": 16}],
    "dinov2": [{"image_size": 28, "position_size": 56}, {"image_size": 28, "position_size": 56, "resize": "native"}],
    "dinov3": [{"image_size": 32}, {"image_size": 32, "resize": "native"}],
    "qwen_vit": [{"image_size": 56, "full_attention": [1], "min_pixels": 100, "max_pixels": 4000}],
    "qwen3_vit": [
        {
            "image_size": 64,
            "deepstack": [0],
            "deepstack_width": 24,
            "merge_size": 1,
            "min_pixels": 100,
            "max_pixels": 4000,
        }
    ],
    "whisper": [{"max_seconds": 0.5}],
    "qwen_audio": [{"max_seconds": 0.5, "num_mels": 20}],
}
"""Keys of the models in which each key of a family is read once."""
AXES = ("modules.language.llm.mrope_section=[2,1,1]", "modules.language.llm.mrope_interleaved=true")
"""Of positions, which the other options know nothing of."""
OTHER = {"resize": "fixed", "interpolation": "bilinear", "normalization": "LayerNorm", "activation": "relu"}
"""Values of keys that have choices."""


def test_all_families_of_layers_are_here():
    plain = {name for name, family in FAMILIES.items() if family.is_plain}
    assert ENCODERS.keys() == FAMILIES.keys() - plain - {"joined"}


@pytest.fixture(scope="module")
def read(tmp_path_factory, digits) -> dict[str, set[str]]:
    """Keys that were read, by family, `llm`, `projector` and `resampler`."""
    place = "modules.images.projector."
    one = ("train.global_batch_size=1", "train.micro_batch_size=1")
    resampler = (*one, f"{place}resampler.latents=2", f"{place}resampler.num_attention_heads=2", f"{place}norm=RMSNorm")
    runs = [
        config("vlm_digits", tmp_path_factory.mktemp("run"), digits, "layout=one_process", *resampler, *more)
        for more in ((*OPTIONS, *DELTA), (*OPTIONS, *EXPERTS), AXES, LATENT, BIASES)
    ]
    (found,) = run_ranks(_all_read, 1, runs)
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_keys_of_encoders(name, read):
    defaults = [FAMILIES[name].spec(**TINY | keys) for keys in ENCODERS[name]]
    for spec in defaults:
        assert not spec.faults() + spec.joint_faults(1)
    for key in _keys(FAMILIES[name].spec) - NAMES - read[name]:
        changed = dataclasses.replace(defaults[0], **{key: _other(key, getattr(defaults[0], key))})
        found = changed.faults() + changed.joint_faults(1)
        assert [field for field, _ in found if field.removeprefix("encoder.") == key], f"{key} is ignored"


@pytest.mark.parametrize(
    ("part", "kind"), [("projector", ProjectorSpec), ("resampler", ResamplerSpec), ("llm", LlmSpec)]
)
def test_keys_of_other_parts(part, kind, read):
    assert _keys(kind) - NAMES - DOCUMENTED <= read[part]


def test_keys_that_mean_nothing_are_refused():
    """Where what they are about is not there."""
    for spec, keys in (
        (ProjectorSpec(kind="linear"), ("activation", "ffn_hidden_size")),
        (ProjectorSpec(), ("norm_epsilon",)),
        (ResamplerSpec(), _keys(ResamplerSpec) - {"latents"}),
        (LlmSpec(position="learned"), ("rope_base", "local_rope_base")),
        (LlmSpec(), ("full_attention_layers", "dense_layers", "local_rope_base")),
        (
            LlmSpec(),
            [
                key
                for key in _keys(LlmSpec)
                if key.startswith(("expert", "router", "shared", "linear_num", "linear_key"))
            ],
        ),
    ):
        for key in keys:
            changed = dataclasses.replace(spec, **{key: _other(key, getattr(spec, key))})
            found = [one.key for one in changed.faults("llm")] if isinstance(spec, LlmSpec) else dict(changed.faults())
            assert any(one.endswith(key) for one in found), key


def _keys(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _other(key: str, value: Any) -> Any:
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "none"
    if isinstance(value, dict):
        return {"fps": 1}
    return [0] if isinstance(value, list) else value + 1


def _recorded(spec: Any, reads: set[str]) -> Any:
    """The same spec, whose reads are noted."""
    kind = type(spec)

    class Recorded(kind):  # type: ignore[valid-type,misc]
        def __getattribute__(self, name: str) -> Any:
            reads.add(name)
            return super().__getattribute__(name)

    object.__setattr__(spec, "__class__", Recorded)
    return spec


def _all_read(runs: list) -> dict[str, set[str]]:
    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.parallel.groups import build_groups

    found: dict[str, set[str]] = {name: set() for name in (*ENCODERS, "projector", "resampler", "llm")}
    for cfg in runs:
        _of_a_run(cfg, found)
    layout = ModuleLayout(name="images", tp=1, pp=1, dp=1, cp=1, ep=1, sp=False, first_rank=0)
    groups = build_groups(RunLayout({"images": layout}, (), (0,))).collections["images"]
    for name, models in ENCODERS.items():
        for keys in models:
            _of_an_encoder(FAMILIES[name].spec(**TINY | keys), layout, groups, found[name])
    return found


def _of_a_run(cfg: Any, found: dict[str, set[str]]) -> None:
    import torch

    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfg)
    _recorded(run.cfg.llm, found["llm"])
    projector = run.cfg.modules["images"].projector
    _recorded(projector.resampler, found["resampler"])
    _recorded(projector, found["projector"])
    parts = build_parts(run, *start_processes(run.cfg))
    place = parts.tokenizer.placeholder_id("<image>")
    ids = torch.tensor([[place, place, 5, 6]])
    parts.pipeline.shapes.begin({"images": [2]})
    size = cfg.modules["images"].encoder.input_size(1, 1)
    parts.pipeline.model[0](
        input_ids=ids,
        position_ids=torch.arange(4)[None],
        labels=ids,
        loss_mask=torch.ones(1, 4),
        modality_inputs={"images": {"images": {"pixels": torch.zeros(1, 3, *size, dtype=torch.uint8)}}},
    )


def _of_an_encoder(spec: Any, layout: Any, groups: Any, reads: set[str]) -> None:
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import ModuleConfig
    from mimo_train.models.layers import layer_spec
    from mimo_train.models.norms import norm_class
    from mimo_train.models.transformer_config import encoder_config

    modules = {"images": ModuleConfig(encoder=spec, projector=ProjectorSpec()), "language": ModuleConfig(llm=LlmSpec())}
    family = FAMILIES[spec.family]
    _recorded(spec, reads)
    if spec.kind == "image":
        assert spec.transform
    size = spec.input_size(*((50, 40) if spec.kind == "image" else (7000, 16000)), merge=1)
    config = encoder_config(ConfigContainer(modules=modules), layout)
    layers = layer_spec(config, AttnMaskType.no_mask, False)
    encoder = family.load()(config, spec, layers, norm_class(False), 1, groups)
    media = torch.zeros(1, 3, *size, dtype=torch.uint8) if spec.kind == "image" else torch.randn(1, size[0])
    assert len(encoder(media)) == spec.num_tokens(*size, merge=1)
