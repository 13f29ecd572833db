"""Adapters as PEFT keeps them: `adapter_config.json` and `adapter_model.safetensors` (checked with peft 0.21.2).

PEFT has an adapter for each linear layer of a Hugging Face model, of which ours fuse several. Both ways are exact: an
adapter beside a whole fused layer becomes one of each projection, with the same A and that projection's rows of B and
of the magnitudes; PEFT's adapters become ours of each projection.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mimo_train.config.fault import UserError, nearest
from mimo_train.config.parts import ADAPTERS
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.model.fused_rows import FusedRows
from mimo_train.plan.adapters import WHOLE, Linear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Places = Mapping[str, Mapping[str, str]]
"""Where PEFT has our linear layers: name of the layer in its module -> projection (`Linear.projections`) -> path of the
module in the Hugging Face model, such as `model.layers.0.self_attn.q_proj`."""

_PREFIX = "base_model.model."
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")

_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    # Which layers have adapters is read from the tensors.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # Settings of what another key switches on.
    *("megatron_core", "qalora_group_size"),
}
"""Keys that do not change what the tensors mean."""
_NEUTRAL: dict[str, tuple] = {"bias": ("none",)}
"""Values that mean nothing, of keys where these are not empty."""
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is."""

_MERGE = "merge the adapter with peft (merge_and_unload) and start from the merged model"


def write_adapter(
    folder: Path,
    adapters: Mapping[str, torch.Tensor],
    lora: LoraConfig,
    linears: Sequence[Linear],
    places: Places,
    *,
    base_model: str = "",
    task_type: str = "CAUSAL_LM",
) -> None:
    """Write the adapters of one module into `folder`.

    Args:
        adapters: whole tensors by their names in the module, as `lora.whole_adapters` gives them.
        linears: the linear layers of the module (`plan.adapters.linears`).
        base_model: folder or name of the model that the adapters are for.

    Raises:
        UserError: a layer with adapters has no place in the Hugging Face model.
    """
    tensors: dict[str, torch.Tensor] = {}
    for linear in linears:
        for projection, adapter in _by_projection(linear, adapters).items():
            path = places.get(linear.name, {}).get(projection)
            if path is None:
                raise UserError(
                    f"{linear.name} has an adapter of {projection}, and the Hugging Face model has no layer for it: "
                    "leave it out of lora.targets"
                )
            tensors |= {f"{_PREFIX}{path}.{_NAMES[name]}": tensor for name, tensor in adapter.items()}
    modules = sorted({key.removeprefix(_PREFIX).partition(".lora_")[0] for key in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        # Whole paths: their last parts may also be names of layers without adapters, of a vision tower for example.
        "target_modules": modules,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.clone() for key, value in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(folder: Path, linears: Sequence[Linear], places: Places) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The adapter in `folder`: the config of a module that has it, and whole tensors by their names in the module, for
    `lora.load_adapters`. Arguments as of `write_adapter`.

    Raises:
        UserError: files are missing or cannot be read, a tensor is of no layer of this module or of another shape, or
            the adapter does what ours cannot; by name.
    """
    lora = _read_config(folder)
    found = _read_tensors(folder)
    of_path = {path: (linear, name) for linear in linears for name, path in places.get(linear.name, {}).items()}
    adapters, targets = {}, set()
    for path, parts in found.items():
        if path not in of_path:
            raise UserError(
                f"{folder / WEIGHTS}: {path} is no layer that can have adapters here{nearest(path, of_path)}"
            )
        linear, projection = of_path[path]
        own = projection if linear.fused else WHOLE
        shapes = _shapes(linear, projection, lora)
        if parts.keys() != shapes.keys():
            what = " and ".join(_NAMES[name] for name in sorted(parts.keys() ^ shapes.keys()))
            kind = "is missing" if parts.keys() < shapes.keys() else "does not belong there"
            raise UserError(f"{folder / WEIGHTS}: {path}: {what} {kind}, with use_dora {str(lora.dora).lower()}")
        for name, tensor in parts.items():
            if tuple(tensor.shape) != shapes[name]:
                raise UserError(
                    f"{folder / WEIGHTS}: {path}.{_NAMES[name]} has shape {tuple(tensor.shape)}, and {linear.name} "
                    f"needs {shapes[name]} for it"
                )
            adapters[".".join(filter(None, (linear.name, own, name)))] = tensor
        targets.add((linear.name, own))
    lora.targets = _targets(linears, targets)
    return lora, adapters


def _by_projection(linear: Linear, adapters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Projection -> its adapter, of those that a linear layer has."""
    names = [name for name, _ in linear.projections]
    found = {}
    for projection in (WHOLE, *names):
        prefix = ".".join(filter(None, (linear.name, projection)))
        own = {name: adapters[f"{prefix}.{name}"] for name in ADAPTERS if f"{prefix}.{name}" in adapters}
        if not own:
            continue
        if projection != WHOLE:
            found[projection] = own
            continue
        rows = FusedRows(linear)
        parts = {name: rows.split(own[name], names) for name in own if name != "lora_a"}
        found |= {one: {"lora_a": own["lora_a"], **{name: parts[name][one] for name in parts}} for one in names}
    return found


def _shapes(linear: Linear, projection: str, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    rows = linear.rows(projection)
    shapes: dict[str, tuple[int, ...]] = {"lora_a": (lora.rank, linear.inputs), "lora_b": (rows, lora.rank)}
    return shapes | ({"lora_magnitude": (rows,)} if lora.dora else {})


def _read_config(folder: Path) -> LoraConfig:
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        rank, alpha, dropout = int(config["r"]), float(config["lora_alpha"]), float(config.get("lora_dropout") or 0.0)
        rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read as a LoRA adapter of PEFT ({error!r}): give the folder of one"
        ) from error
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {config.get('peft_type')!r}, adapters here are LORA: {_MERGE}")
    for key, value in config.items():
        if key in _READ | _WITHOUT_EFFECT or value in _NEUTRAL.get(key, (None, False, "", [], {})):
            continue
        raise UserError(f"{file}: {key} is {value!r}, which adapters here cannot represent: {_MERGE}")
    start = config.get("init_lora_weights", True)
    if start not in _STARTS:
        raise UserError(f"{file}: init_lora_weights {start!r} changes the weights of the base model: {_MERGE}")
    lora = LoraConfig(rank=rank, alpha=alpha, dropout=dropout, rslora=rslora, dora=dora)
    fault = next(lora.faults("lora"), None)
    if fault is not None or rank < 1:
        raise UserError(f"{file}: {fault or f'r is {rank}, and must be at least 1'}")
    return lora


def _read_tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Path of a module -> its adapter's tensors by our names."""
    file, names = folder / WEIGHTS, {theirs: ours for ours, theirs in _NAMES.items()}
    if not file.is_file():
        pickled = ": adapter_model.bin is a pickle, which is not read; save it with peft as safetensors"
        raise UserError(f"no file {file}{pickled if (folder / 'adapter_model.bin').is_file() else ''}")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise UserError(f"{file}: {key} is no tensor of a linear layer's adapter: {_MERGE}")
        found.setdefault(match[1], {})[names[match[2]]] = tensor
    if not found:
        raise UserError(f"{file} holds no adapter")
    return found


def _targets(linears: Sequence[Linear], found: set[tuple[str, str]]) -> list[str]:
    """`lora.targets` that name these (layer, projection) and no others: last parts of names where these are enough."""
    paths = {
        (linear.name, projection): name
        for linear in linears
        for name, projection in linear.names().items()
        if not (projection == WHOLE and name != linear.name)
    }
    last = {key: path.rpartition(".")[2] for key, path in paths.items()}
    short = {last[key] for key in found}
    in_layers = {linear.name for linear in linears if linear.layer is not None}
    if all(name in in_layers for name, _ in found) and found == {
        key for key in paths if last[key] in short and key[0] in in_layers
    }:
        return sorted(short)
    return sorted(paths[key] for key in found)
