"""Encoders that are made here leave as a directory that their class of transformers loads, with equal features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.demo.make import make_demo
from mimo_train.config.compose import load
from tests.dist.commands import command
from tests.dist.hf.one_step import BOUND, difference, ours, overrides, together
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, config
from tests.dist.steps import Steps

SIDE = 7
"""Of a patch, in pixels."""
CLIP, MERGE = 20000, 4
"""Samples of a clip; frames of one token."""


def _images(family: str, *keys: str) -> tuple[str, ...]:
    """Overrides of a tiny encoder of images."""
    sizes = {"hidden_size": 24, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 2}
    sizes |= {"patch_size": SIDE, "image_size": 6 * SIDE}
    place = "modules.images.encoder."
    group = {"dinov2": "dinov2_large", "dinov3": "dinov3_vitl16", "siglip2": "siglip2_so400m_naflex"}[family]
    plain = (f"{place}{name}={value}" for name, value in sizes.items())
    return (f"encoder@modules.images.encoder={group}", *plain, *(f"{place}{key}" for key in keys))


WHISPER = (
    *(f"modules.audio.encoder.{key}" for key in ("sample_rate=16000", "max_seconds=4", "pad_clips=true")),
    *(f"modules.audio.encoder.{key}" for key in ("key_bias=false", "hidden_size=24", "ffn_hidden_size=48")),
)
RUNS: dict[str, tuple[str, ...]] = {
    "dinov2": _images("dinov2", "position_size=35"),
    "dinov2 of a layer": _images("dinov2", "feature_layer=-2", "final_norm=false", "register_tokens=0"),
    "registers": _images("dinov2", "register_tokens=2", "activation=swiglu", "ffn_hidden_size=32"),
    "siglip2": _images("siglip2", "max_patches=40"),
    "dinov3": (*_images("dinov3"), *WHISPER, "data.sequence_length=512"),
    "dinov3 gated": _images("dinov3", "register_tokens=0", "activation=swiglu", "final_norm=false"),
}
CLASSES = {
    "dinov2": "Dinov2Model",
    "dinov2 of a layer": "Dinov2Model",
    "registers": "Dinov2WithRegistersModel",
    "siglip2": "Siglip2VisionModel",
    "dinov3": "DINOv3ViTModel",
    "dinov3 gated": "DINOv3ViTModel",
    "whisper": "WhisperModel",
}


@pytest.fixture(scope="module")
def exported(digits, tmp_path_factory) -> dict[str, tuple[str, list[str], float]]:
    """By case: the class that loads its directory, tensors missing or left over, and the difference of features."""
    root = tmp_path_factory.mktemp("classes")
    make_demo(root / "mixed", "mixed", train_samples=16, held_out_samples=4, shards=1)
    cfgs = {}
    for name, keys in RUNS.items():
        demo, shards = ("mixed_tiny", root / "mixed") if name == "dinov3" else ("vlm_digits", digits)
        keys += () if name == "dinov3" else ("layout=one_process", "modules.images.projector.kind=linear")
        cfgs[name] = config(demo, root / "runs" / name, shards, *keys)
    (found,) = run_ranks(_export_all, 1, cfgs, root)
    return found


def _export_all(cfgs: dict[str, Any], root: Path) -> dict[str, tuple[str, list[str], float]]:
    """Our features before the export, which ends the process group, and those of transformers after it."""
    from megatron.core.utils import unwrap_model

    from mimo_train.models.parameters import modules_of

    runs, found = {}, {}
    for number, (name, cfg) in enumerate(cfgs.items()):
        run = Steps(cfg)
        modules = {module: unwrap_model(chunk) for module, (chunk,) in modules_of(run.model).items()}
        torch.manual_seed(number)
        read = {}
        for module in modules.keys() - {"language"}:
            encoder = modules[module].encoders[module]
            _draw(encoder)
            medium = _medium(encoder.spec)
            with torch.no_grad():
                features = encoder([medium], [_size(encoder.spec)])
            read[module] = encoder.spec, medium, features.numpy()
        runs[name] = str(run.save()), read
    for name, (checkpoint, read) in runs.items():
        code, said = command(["export", checkpoint, "--to", str(root / name)])
        assert code == 0, said
        for module, (spec, medium, features) in read.items():
            kind, wrong, theirs = _theirs(spec, root / name / module, medium)
            case = name if module == "images" else "whisper"
            found[case] = kind, wrong, difference(features, theirs.numpy())
    return found


def _draw(encoder: Any) -> None:
    """Give an encoder weights that matter; keys without a bias keep zeros in its place."""
    for name, value in encoder.named_parameters():
        torch.nn.init.normal_(value, std=0.3)
        if name.endswith("linear_qkv.bias") and not encoder.spec.key_bias:
            value.data.view(encoder.spec.num_attention_heads, 3, -1)[:, 1] = 0


def _size(spec: Any) -> tuple[int, int]:
    if spec.kind == "audio":
        return spec.max_samples, spec.sample_rate
    return (4 * SIDE, 9 * SIDE) if spec.family == "siglip2" else (6 * SIDE, 6 * SIDE)


def _medium(spec: Any) -> torch.Tensor:
    """Return an image, or a clip with silence behind it."""
    generator, size = torch.Generator().manual_seed(1), _size(spec)
    if spec.kind == "audio":
        return torch.nn.functional.pad(torch.randn(CLIP, generator=generator), (0, size[0] - CLIP))
    assert spec.input_size(*size) == size
    return torch.randint(0, 256, (3, *size), generator=generator).to(torch.uint8)


@torch.no_grad()
def _theirs(spec: Any, folder: Path, medium: torch.Tensor) -> tuple[str, list[str], torch.Tensor]:
    """Return the class that loads a directory, its tensors missing or left over, and features [N, H]."""
    import transformers

    model, loading = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    if spec.kind == "audio":
        extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        batch = extractor(medium[:CLIP].numpy(), sampling_rate=spec.sample_rate, return_tensors="pt")
        states = model.encoder(**batch).last_hidden_state
        features = states.reshape(-1, states.size(-1) * MERGE)
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        batch = processor(images=[medium.permute(1, 2, 0).numpy()], return_tensors="pt")
        output = model(**batch, output_hidden_states=True)
        states = output.last_hidden_state if spec.final_norm else output.hidden_states[-1]
        features = states[0, spec.leading_tokens :][: spec.num_tokens(*_size(spec))]
    return type(model).__name__, [*loading["missing_keys"], *loading["unexpected_keys"]], features


@pytest.mark.parametrize("case", CLASSES)
def test_features_are_those_of_the_class_that_loads_the_export(case, exported):
    kind, wrong, error = exported[case]
    assert (kind, wrong) == (CLASSES[case], []) and error < BOUND


def test_a_dinov2_tower_leaves_inside_one_llava_with_equal_logits(digits, tmp_path):
    """Its class token is dropped, and the norm behind its layers is not applied. Version 5 of transformers renames its
    layers in memory, so that adapters have no place and are merged."""
    steps = ("train.global_batch_size=4", "train.micro_batch_size=4", "data.sequence_length=160", *TINY[:5])
    keys = (*_images("dinov2", "feature_layer=-2", "final_norm=false", "init_std=0.3"), "modules.images.lora.rank=2")
    cfg = load("vlm_digits", (*overrides(tmp_path / "run", digits), *steps, *keys, "layout=one_process"))
    (found,) = run_ranks(ours, 1, cfg, "before")
    ((code, said),) = run_ranks(command, 1, ["export", cfg.run.dir, "--to", str(tmp_path / "apart")])
    assert code == 1 and "give --merge" in said, said
    ((code, said, wrong, logits),) = run_ranks(_logits_of_llava, 1, cfg, together(found["batch"]), tmp_path / "out")
    assert code == 0 and "as one LLaVA (dinov2, llama)" in said, said
    assert wrong == [] and difference(found["logits"][..., : logits.shape[-1]], logits) < BOUND


def _logits_of_llava(cfg, whole: dict[str, np.ndarray], to: Path) -> tuple[int, str, list[str], np.ndarray]:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    code, said = command(["export", cfg.run.dir, "--to", str(to), "--merge"])
    model, loading = AutoModelForImageTextToText.from_pretrained(to, output_loading_info=True)
    normalise = AutoImageProcessor.from_pretrained(to)
    pixels = normalise(list(whole["pixels"]), do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(whole["input_ids"]), pixel_values=pixels).logits
    return code, said, [*loading["missing_keys"], *loading["unexpected_keys"]], logits.numpy()
