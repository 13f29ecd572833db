"""Encoders of `transformers` with random weights and odd sizes, saved as published directories are; and what they make
of images and clips."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6}
"""Heads of 12."""
SIDE = 7
"""Of a patch, in pixels."""


@dataclass(frozen=True)
class Reading:
    """One way to read a tower: keys beside those of its directory, and what transformers gives of it."""

    keys: dict[str, Any]
    features: Callable[[Any], torch.Tensor]
    """Of the model's output."""


@dataclass(frozen=True)
class Tower:
    """A model of transformers, how it is saved and how it is read."""

    model: Callable[[], torch.nn.Module]
    readings: dict[str, Reading]
    renamed: dict[str, str] = field(default_factory=dict)
    """Patterns of names in memory, and what published directories have instead."""
    config: dict[str, Any] = field(default_factory=dict)
    """Other values of config.json."""
    preprocessor: dict[str, Any] = field(default_factory=dict)
    split: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors
    """Other changes of the tensors on their way to the directory."""
    keep: Callable[[str], bool] = lambda name: True
    """Names in memory of what is saved."""
    merge: int = 1
    media: Callable[[], list[torch.Tensor]] = lambda: [images(2, 6 * SIDE, 6 * SIDE)]
    """Media of equal size together, as our encoder takes them."""
    run: Callable[[torch.nn.Module, torch.Tensor], Any] = lambda model, media: model(
        normalised(media), output_hidden_states=True
    )


def images(count: int, height: int, width: int) -> torch.Tensor:
    """uint8 [count, 3, height, width]."""
    return torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(3)).to(torch.uint8)


def normalised(media: torch.Tensor) -> torch.Tensor:
    """Pixels from -1 to 1."""
    return media.float() / 127.5 - 1


def _patches(states: torch.Tensor, leading: int) -> torch.Tensor:
    return states[:, leading:].flatten(0, 1)


def _clip(act: str = "quick_gelu") -> torch.nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=6 * SIDE, patch_size=SIDE, hidden_act=act))


def _siglip() -> torch.nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**SIZES, image_size=6 * SIDE + 2, patch_size=SIDE))


def _siglip2() -> torch.nn.Module:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2VisionModel(Siglip2VisionConfig(**SIZES, num_patches=25, patch_size=SIDE))


def _run_siglip2(model: torch.nn.Module, media: torch.Tensor) -> Any:
    rows, columns = media.shape[2] // SIDE, media.shape[3] // SIDE
    patches = normalised(media).unflatten(2, (rows, SIDE)).unflatten(4, (columns, SIDE))
    patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.int64)
    shapes = torch.tensor([[rows, columns]] * len(media))
    return model(patches, pixel_attention_mask=mask, spatial_shapes=shapes, output_hidden_states=True)


def _dinov2(gated: bool, registers: int = 0) -> torch.nn.Module:
    import transformers

    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    own = {"mlp_ratio": 2, "image_size": 5 * SIDE, "patch_size": SIDE, "use_swiglu_ffn": gated, "layerscale_value": 0.7}
    if registers:
        config = transformers.Dinov2WithRegistersConfig(**sizes, **own, num_register_tokens=registers)
        return transformers.Dinov2WithRegistersModel(config)
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, **own))


def _join_gate_and_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published DINOv2 has both in one tensor."""
    joined = {}
    for name, value in tensors.items():
        if "gate_proj" in name:
            up = tensors[name.replace("gate_proj", "up_proj")]
            joined[name.replace("gate_proj", "weights_in")] = torch.cat([value, up])
        elif "up_proj" not in name:
            joined[name.replace("mlp.down_proj", "mlp.weights_out")] = value
    return joined


def _dinov3(gated: bool) -> torch.nn.Module:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    act = {"use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu"}
    own = {"image_size": 6 * SIDE, "patch_size": SIDE, "num_register_tokens": 2, "layerscale_value": 0.7}
    return DINOv3ViTModel(DINOv3ViTConfig(**SIZES, **own, **act))


def _qwen() -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    sizes = {"depth": 3, "hidden_size": 72, "num_heads": 6, "intermediate_size": 100, "out_hidden_size": 40}
    own = {"patch_size": SIDE, "window_size": 4 * SIDE, "fullatt_block_indexes": [1]}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**sizes, **own))


def _run_qwen(model: torch.nn.Module, media: torch.Tensor) -> torch.Tensor:
    """The input of the merger's linear layers, tokens row by row."""
    from transformers.vision_utils import get_vision_window_index

    rows, columns = media.shape[2] // SIDE, media.shape[3] // SIDE
    patches = normalised(media).unflatten(2, (rows // 2, 2, SIDE)).unflatten(5, (columns // 2, 2, SIDE))
    patches = patches.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).repeat(1, 1, 1, 1, 1, 1, 2, 1, 1)
    found: list[torch.Tensor] = []
    hook = model.merger.mlp[0].register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    shapes = torch.tensor([[1, rows, columns]] * len(media))
    model(patches.reshape(-1, 3 * 2 * SIDE**2), grid_thw=shapes)
    hook.remove()
    order, _ = get_vision_window_index(shapes, 2, 4 * SIDE, SIDE)
    return found[0][torch.argsort(order)]


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    own = {"num_mel_bins": 20, "d_model": 72, "encoder_layers": 3, "encoder_attention_heads": 6, "encoder_ffn_dim": 100}
    return WhisperEncoder(WhisperConfig(**own, max_source_positions=55))


def _run_whisper(model: torch.nn.Module, media: torch.Tensor) -> Any:
    """Clips without the silence behind them, to which the extractor adds it again."""
    heard = [wave[: int(wave.nonzero().max()) + 1] for wave in media]
    return model(_mels(heard, media.size(1)))


def _mels(waves: list[torch.Tensor], samples: int) -> torch.Tensor:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=20)
    clips = [wave.numpy() for wave in waves]
    return extractor(clips, sampling_rate=16000, return_tensors="pt", max_length=samples).input_features


def _run_whisper_for_as_long(model: torch.nn.Module, media: torch.Tensor) -> Any:
    """The same weights in an encoder that is as long as the clips: transformers' takes clips of one length."""
    import copy

    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = copy.deepcopy(model.config)
    config.max_source_positions = frames = media.size(1) // 320
    parameters = {
        name: value[:frames] if "embed_positions" in name else value for name, value in model.named_parameters()
    }
    return torch.func.functional_call(WhisperEncoder(config).eval(), parameters, (_mels(list(media), media.size(1)),))


def _clips(*lengths: int) -> torch.Tensor:
    """Clips of these lengths, with silence behind them up to the longest."""
    noise = torch.randn(len(lengths), max(lengths), generator=torch.Generator().manual_seed(1))
    return noise * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def _states(leading: int, last: bool) -> dict[str, Reading]:
    """Readings of a model whose last hidden state is behind its last norm, and whose hidden states are not."""
    found = {
        "last norm": Reading({}, lambda output: _patches(output.last_hidden_state, leading)),
        "layer -1": Reading({"final_norm": False}, lambda output: _patches(output.hidden_states[-1], leading)),
        "layer -2": Reading(
            {"final_norm": False, "feature_layer": -2}, lambda output: _patches(output.hidden_states[-2], leading)
        ),
        "layer -3": Reading(
            {"final_norm": False, "feature_layer": -3}, lambda output: _patches(output.hidden_states[-3], leading)
        ),
    }
    if leading:
        found["class token"] = Reading(
            {"keep_class_token": True},
            lambda output: torch.cat(
                [output.last_hidden_state[:, :1], output.last_hidden_state[:, leading:]], 1
            ).flatten(0, 1),
        )
    if not last:  # CLIP
        del found["last norm"]
    return found


HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _square(pixels: int) -> dict[str, Any]:
    return HALVES | {"size": {"shortest_edge": pixels}, "crop_size": {"height": pixels, "width": pixels}}


_DINOV2_NAMES = {
    r"attention\.([qkv])_proj": r"attention.attention.\1",
    r"attention\.attention\.q\b": "attention.attention.query",
    r"attention\.attention\.k\b": "attention.attention.key",
    r"attention\.attention\.v\b": "attention.attention.value",
    r"attention\.o_proj": "attention.output.dense",
}

TOWERS: dict[str, Tower] = {
    "clip": Tower(_clip, _states(1, last=False), {"^": "vision_model."}, preprocessor=_square(6 * SIDE)),
    "clip of LAION": Tower(
        lambda: _clip("gelu"),
        {"layer -2": _states(1, last=False)["layer -2"]},
        {"^": "vision_model."},
        preprocessor=_square(6 * SIDE),
    ),
    "siglip": Tower(
        _siglip,
        _states(0, last=True),
        {"^": "vision_model."},
        preprocessor=HALVES | {"size": {"height": 6 * SIDE + 2, "width": 6 * SIDE + 2}},
        media=lambda: [images(2, 6 * SIDE + 2, 6 * SIDE + 2)],
    ),
    "siglip2": Tower(
        _siglip2,
        _states(0, last=True),
        {"^": "vision_model."},
        preprocessor=HALVES | {"patch_size": SIDE, "max_num_patches": 40},
        media=lambda: [images(*one) for one in ((2, 4 * SIDE, 9 * SIDE), (1, 6 * SIDE, 6 * SIDE), (1, 84, 21))],
        run=_run_siglip2,
    ),
    "dinov2": Tower(lambda: _dinov2(False), _states(1, last=True), _DINOV2_NAMES, preprocessor=_square(6 * SIDE)),
    "dinov2 gated": Tower(
        lambda: _dinov2(True),
        {"last norm": _states(1, last=True)["last norm"]},
        _DINOV2_NAMES,
        preprocessor=_square(5 * SIDE),
        split=_join_gate_and_up,
        media=lambda: [images(2, 5 * SIDE, 5 * SIDE)],
    ),
    "dinov2 with registers": Tower(
        lambda: _dinov2(False, registers=2),
        {"last norm": _states(3, last=True)["last norm"]},
        _DINOV2_NAMES,
        preprocessor=_square(6 * SIDE),
    ),
    "dinov3": Tower(
        lambda: _dinov3(False),
        _states(3, last=True),
        {r"^model\.layer": "layer"},
        preprocessor=HALVES | {"size": {"height": 6 * SIDE, "width": 6 * SIDE}},
    ),
    "qwen2.5-vl": Tower(
        _qwen,
        {"last norm": Reading({}, lambda output: output)},
        {"^": "visual."},
        config={"model_type": "qwen2_5_vl_vision"},
        preprocessor=HALVES | {"patch_size": SIDE, "size": {"shortest_edge": 100, "longest_edge": 14 * 14 * 60}},
        keep=lambda name: not name.startswith("merger.mlp"),
        merge=2,
        media=lambda: [images(*one) for one in ((2, 70, 98), (1, 42, 42), (1, 14, 140))],
        run=_run_qwen,
    ),
    "whisper": Tower(
        _whisper,
        {"last norm": Reading({}, lambda output: output.last_hidden_state.flatten(0, 1))},
        {"^": "model.encoder."},
        config={"model_type": "whisper"},
        preprocessor={"feature_size": 20},
        media=lambda: [_clips(17600, 9001, 17600)],
        run=_run_whisper,
    ),
    "whisper, clips of their lengths": Tower(
        _whisper,
        {"last norm": Reading({"pad_clips": False}, lambda output: output.last_hidden_state.flatten(0, 1))},
        {"^": "model.encoder."},
        config={"model_type": "whisper"},
        preprocessor={"feature_size": 20},
        media=lambda: [_clips(17600), _clips(6400, 6400)],
        run=_run_whisper_for_as_long,
    ),
    "dinov3 gated": Tower(
        lambda: _dinov3(True),
        {"last norm": _states(3, last=True)["last norm"]},
        {r"^model\.layer": "layer"},
        preprocessor=HALVES | {"size": {"height": 6 * SIDE, "width": 6 * SIDE}},
    ),
}


@dataclass(frozen=True)
class Published:
    """A tower on disk, and what transformers makes of its media."""

    folder: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    merge: int
    media: list[torch.Tensor]
    readings: dict[str, dict[str, Any]]
    features: dict[str, torch.Tensor]
    """By reading."""
    gradients: Path
    """A directory with the gradients of the loss of the first reading, by the tensors' names."""
    loss: float
    """`loss_of` the features of the first reading."""


def publish(tower: Tower, folder: Path) -> Published:
    """Save a tower with random weights."""
    torch.manual_seed(7)
    model = tower.model().eval()
    _redraw(model)
    media = tower.media()
    outputs = [tower.run(model, one) for one in media]
    features = {
        name: torch.cat([reading.features(output) for output in outputs]) for name, reading in tower.readings.items()
    }
    loss = loss_of(next(iter(features.values())))
    loss.backward()
    config = model.config.to_dict() | tower.config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(tower.preprocessor))
    (folder / "gradients").mkdir()
    buffers = {name: value for name, value in model.state_dict().items() if name not in dict(model.named_parameters())}
    assert not buffers, list(buffers)
    weights = {name: value.detach() for name, value in model.named_parameters() if tower.keep(name)}
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in model.named_parameters()
        if tower.keep(name)
    }
    for place, tensors in ((folder, weights), (folder / "gradients", gradients)):
        save_file(
            {_published(name, tower.renamed): value.contiguous() for name, value in tower.split(tensors).items()},
            place / "model.safetensors",
            metadata={"format": "pt"},
        )
    readings = {name: reading.keys for name, reading in tower.readings.items()}
    kept = {name: value.detach() for name, value in features.items()}
    found = folder / "gradients", loss.item()
    return Published(folder, config, tower.preprocessor, tower.merge, media, readings, kept, *found)


def loss_of(features: torch.Tensor) -> torch.Tensor:
    """Mean square of features times numbers that are different for every one of them."""
    return (features * torch.linspace(-1, 2, features.numel()).view_as(features).sin()).square().mean()


def _redraw(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not value.requires_grad:
                continue  # Whisper's sinusoids
            norm = value.ndim == 1 and name.endswith("weight")
            spread = 0.3 if norm or value.ndim == 1 or "emb" in name or "token" in name else value[0].numel() ** -0.5
            value.normal_(1.0 if norm or "lambda" in name else 0.0, spread)


def _published(name: str, renamed: dict[str, str]) -> str:
    for pattern, new in renamed.items():
        name = re.sub(pattern, new, name)
    return name
