"""Helpers that readers of pretrained encoders share: values of `transformers`' config files."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from encoders.base import LayeredSpec
from encoders.errors import EncoderError
from encoders.native.vit.patch_spec import PatchSpec

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Our names by those of transformers."""


@dataclass(frozen=True)
class Published:
    """An encoder made here in the format of `transformers`."""

    config: dict[str, Any]
    """config.json, without the dtype."""
    preprocessor: dict[str, Any]
    """preprocessor_config.json."""
    unread: dict[str, tuple[tuple[int, ...], float | None]] = field(default_factory=dict)
    """Tensors of its class that match no parameter of ours: {name in the directory: (shape, value of every entry)}.
    None as the value means Whisper's sinusoidal positions."""


RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""`resample`, as Pillow numbers it."""

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


PIXELS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
"""Defaults of the preprocessors of all vision towers."""
CROPPED_224 = PIXELS | {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
"""Defaults of the preprocessors of CLIP and DINOv2."""


class ConfigFile:
    """The values of a file of a pretrained model, over the defaults of its `model_type`.

    Args:
        name: name of the file, for errors.
        values: values in the file; None counts as absent.
        defaults: defaults of the class that `transformers` builds from it.
    """

    def __init__(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.name = name
        self._values = {**defaults, **{key: value for key, value in values.items() if value is not None}}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def side(self, key: str) -> int:
        """Return a length in pixels, which may be written as two equal ones. Raises EncoderError for unequal ones."""
        value = self[key]
        lengths = value if isinstance(value, (list, tuple)) else (value,)
        if len(set(lengths)) != 1:
            raise EncoderError(f"{self.name}: {key} is {value}, and only squares can be built")
        return int(lengths[0])

    def activation(self, key: str = "hidden_act") -> str:
        """Return our name of an activation function. Raises EncoderError for an unknown one."""
        if self[key] not in ACTIVATION_NAMES:
            raise EncoderError(f"{self.name}: {key} is {self[key]!r}, must be one of {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[self[key]]

    def require(self, **values: Any) -> None:
        """Reject other values than these, by raising an EncoderError with the key and both values."""
        for key, value in values.items():
            if self.get(key) != value:
                raise EncoderError(f"{self.name}: {key} is {self.get(key)!r}, and only {value!r} can be built")


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the defaults that the config class of a model type declares as plain values. Its source is read, since
    importing a class takes 5 seconds, and torch. Raise EncoderError if the installed `transformers` has none."""
    spec = find_spec("transformers")
    if spec is not None and spec.origin is not None:
        folder, name = Path(spec.origin).parent / "models", model_type
        while name:  # the classes of the parts of a model are in its file
            for file in sorted((folder / name).glob("configuration_*.py")):
                if model_type in (classes := _classes(file)):
                    return classes[model_type]
            name = name.rpartition("_")[0]
    raise EncoderError(f"the installed transformers has no config class for model_type {model_type!r}")


@cache
def _classes(file: Path) -> dict[str, dict[str, Any]]:
    """Return the defaults of the config classes of a file, by model type."""
    classes = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            values: dict[str, Any] = {}
            for entry in node.body:
                if isinstance(entry, ast.Assign | ast.AnnAssign) and entry.value is not None:
                    target = entry.target if isinstance(entry, ast.AnnAssign) else entry.targets[0]
                    with suppress(Exception):  # plain values and their products have no names
                        value = eval(compile(ast.Expression(entry.value), str(file), "eval"), {"__builtins__": {}})
                        values[ast.unparse(target)] = value
            classes[values.get("model_type", node.name)] = values
    return classes


def part_of(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return the values of an encoder, from the config of a model that contains it or from its own config."""
    return config.get(part) or (config if part not in config else {})


def image_values(
    preprocessor: Mapping[str, Any], defaults: Mapping[str, Any], image_size: int, *, any_size: bool = False
) -> dict[str, Any]:
    """Return the fields of `PatchSpec` from a preprocessor's config: how images are resized and normalized.

    Args:
        preprocessor: content of preprocessor_config.json, or processor_config.json with the image processor inside; if
            empty, `defaults` apply, with the encoder's size.
        defaults: defaults of the preprocessor's class.
        image_size: the encoder's image size.
        any_size: True if the encoder reads images of other sizes than `image_size`.

    Raises:
        EncoderError: our data path does not support the preprocessor.
    """
    preprocessor = preprocessor.get("image_processor") or preprocessor
    file = ConfigFile("preprocessor_config.json", preprocessor, defaults)
    file.require(do_resize=True, do_rescale=True, do_normalize=True)
    if file.get("do_pad"):
        raise EncoderError(f"{file.name}: do_pad is {file['do_pad']!r}, and images are not padded here")
    if abs(file["rescale_factor"] * 255 - 1) > 1e-6:
        raise EncoderError(f"{file.name}: rescale_factor is {file['rescale_factor']}, and only 1/255 can be built")
    if file["resample"] not in RESAMPLE:
        raise EncoderError(f"{file.name}: resample is {file['resample']}, must be 2 (bilinear) or 3 (bicubic)")
    values: dict[str, Any] = {
        "interpolation": RESAMPLE[file["resample"]],
        "pixel_mean": list(file["image_mean"]),
        "pixel_std": list(file["image_std"]),
    }
    if not preprocessor:
        edge = file["size"].get("shortest_edge")
        cropped = {"resize": "crop", "shortest_edge": edge * image_size // file["crop_size"]["height"]} if edge else {}
        return values | (cropped or {"resize": "fixed"}) | {"image_size": image_size}
    size = file["size"]
    if isinstance(size, int):
        size = {"shortest_edge": size} if "shortest_edge" in defaults["size"] else {"height": size, "width": size}
    if "shortest_edge" in size:
        if not file.get("do_center_crop"):
            raise EncoderError(
                f"{file.name}: size is {size} without do_center_crop: images of any length: set encoder.resize"
            )
        crop = file["crop_size"]
        values |= {"resize": "crop", "shortest_edge": size["shortest_edge"]}
        square = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
    else:
        values["resize"], square = "fixed", (size["height"], size["width"])
        if file.get("do_center_crop") and file["crop_size"] not in (size, size["height"]):
            raise EncoderError(f"{file.name}: size {size} is cut to {file['crop_size']}, which cannot be built")
    if square[0] != square[1]:
        raise EncoderError(f"{file.name}: images of {square[0]} x {square[1]}, and only squares can be built")
    if square[0] != image_size and not any_size:
        raise EncoderError(
            f"{file.name}: images of {square[0]} x {square[0]} pixels, and config.json has image_size {image_size}"
        )
    return values | {"image_size": square[0]}


def tower_sizes(file: ConfigFile) -> dict[str, Any]:
    """Return the size fields that the config.json of all towers over patches names alike."""
    return {
        "patch_size": file.side("patch_size"),
        "hidden_size": file["hidden_size"],
        "num_layers": file["num_hidden_layers"],
        "num_attention_heads": file["num_attention_heads"],
        "layernorm_epsilon": file["layer_norm_eps"],
    }


def tower_config(spec: LayeredSpec, **further: Any) -> dict[str, Any]:
    """Return the config.json keys that all towers over patches share, with the number of layers that are built. Raise
    EncoderError if `transformers` has no name for the activation function."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}
    if spec.activation not in names:
        raise EncoderError(f"activation is {spec.activation}, and transformers' class has {', '.join(names)}")
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.built_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_channels": 3,
        "hidden_act": names[spec.activation],
        "layer_norm_eps": spec.layernorm_epsilon,
        "attention_dropout": 0.0,
        "initializer_range": spec.init_std,
        **further,
    }


def unread_norm(spec: LayeredSpec, name: str) -> dict[str, tuple[tuple[int, ...], float | None]]:
    """Return an identity norm for the norm after the layers if it is not built."""
    width = (spec.hidden_size,)
    return {} if spec.final_norm else {f"{name}.weight": (width, 1.0), f"{name}.bias": (width, 0.0)}


def preprocessor_config(spec: PatchSpec) -> dict[str, Any]:
    """Return a preprocessor_config.json with which `transformers` preprocesses images as our data path does, bit for
    bit. It names classes on torchvision, which versions 4 and 5 both have. Raise EncoderError if images keep their
    aspect ratio."""
    if spec.resize in ("native", "tiles"):
        raise EncoderError(f"resize is {spec.resize}, and transformers' class has images of one size")
    side = {"height": spec.image_size, "width": spec.image_size}
    is_cut = spec.resize == "crop"
    rounding = "CLIPImageProcessorFast" if is_cut else "SiglipImageProcessorFast"
    sizes: dict[str, Any] = {"size": {"shortest_edge": spec.shortest_edge or spec.image_size} if is_cut else side}
    if is_cut:
        sizes |= {"do_center_crop": True, "crop_size": side}
    return pixel_keys(spec, rounding if spec.transform.rounded else "DINOv3ViTImageProcessorFast", **sizes)


def pixel_keys(spec: PatchSpec, processor: str, **sizes: Any) -> dict[str, Any]:
    """Return preprocessor_config.json of a class of image processors; `sizes` are the keys of image sizes."""
    return {
        "image_processor_type": processor,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": {ours: theirs for theirs, ours in RESAMPLE.items()}[spec.interpolation],
        **sizes,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.pixel_mean),
        "image_std": list(spec.pixel_std),
    }
