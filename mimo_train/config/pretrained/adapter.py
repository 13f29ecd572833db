"""PEFT adapters: `adapter_config.json` -> the keys of `modules.NAME.lora`.

Checked with peft 0.21.2. torch is imported only for an `adapter_model.bin`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE, SAVED
from mimo_train.config.pretrained.hub import snapshot_of
from mimo_train.config.pretrained.weight_files import Unreadable, read_bin_header, read_error, read_header
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.config.transformers_llm import MODEL

CONFIG, WEIGHTS, BIN_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""Prefix of all names in PEFT."""
MERGE = "merge the adapter with peft (merge_and_unload) and start from the merged model"
"""Remedy for an adapter that is not supported."""

TENSOR = re.compile(re.escape(PREFIX) + r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")
"""A tensor of a linear layer's adapter: path of the layer, and kind of the tensor."""

_SAVED = re.compile(re.escape(PREFIX) + r"(?:.+\.)?(embed_tokens|lm_head|score)\.weight")
"""A tensor that was trained next to the adapters: the vocabulary's, or the value head of a reward model."""

_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"}
_READ |= {"rank_pattern", "alpha_pattern"}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    # The tensors show which layers have adapters.
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # Settings of features that another key enables.
    *("megatron_core", "qalora_group_size", "modules_to_save", "ensure_weight_tying"),
}
"""Keys that do not change the meaning of the tensors."""
_NEUTRAL: dict[str, tuple] = {"bias": ("none",)}
"""Neutral values of keys, if not empty."""
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that keep the base model unchanged."""

_OTHER_PARTS = re.compile(r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector)\.")
"""Parts of names of layers outside the language model."""
IN_LAYERS = re.compile(r"(?:^|\.)(?:layers|layer|blocks)\.(\d+)\.")
_LAST = {
    "out_proj": "o_proj",
    "fc1": "up_proj",
    "fc2": "down_proj",
    # Qwen-VL's towers.
    "qkv": "linear_qkv",
    "proj": "o_proj",
    "linear_fc1": "up_proj",
    "linear_fc2": "down_proj",
}
_OURS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "linear_qkv",
    "q_b_proj",
    "kv_b_proj",
)
_OF_DELTA = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
"""Layers of a Gated DeltaNet, which have these names here too."""
_OF_PROJECTOR = {
    "multi_modal_projector.linear_1": ".linear_fc1",
    "multi_modal_projector.linear_2": ".linear_fc2",
    "multi_modal_projector.linear": "",
    # Qwen-VL.
    "merger.mlp.0": ".linear_fc1",
    "merger.mlp.2": ".linear_fc2",
    "merger.linear_fc1": ".linear_fc1",
    "merger.linear_fc2": ".linear_fc2",
}
"""Suffix of the name of a projector's layer -> suffix of ours."""


def adapter_keys(folder: str, module: str, layers: int, built: int, key: str) -> dict[str, Any]:
    """Return the keys of `LoraConfig` for the module that has an adapter.

    Args:
        module: name of the module.
        layers: transformer layers of the module in the directory; 0 for a class of transformers.
        built: number of these layers that are built.
        key: config key that names the folder.

    Raises:
        ConfigError: the adapter cannot be read, is not supported, or has no layers of this module.
    """
    try:
        paths = paths_of(adapted_paths(Path(folder)), module)
        if not paths:
            raise UserError(f"{folder} has no adapter of a layer of {module}")
        lora = read_config(Path(folder), paths)
        unread = unread_layers(paths, module, layers, built)
        of_class = [MODEL + path for path in paths]
        targets = _targets([path for path in paths if path not in unread], built) if layers else of_class
    except UserError as error:
        raise ConfigError([Fault(key, str(error))]) from error
    names = ("rank", "alpha", "dropout", "rslora", "dora")
    saved = [] if module != LANGUAGE else [name for name in SAVED if name in saved_tensors(folder)]
    return {name: getattr(lora, name) for name in names} | {"targets": targets, "modules_to_save": saved}


def saved_tensors(folder: Path | str) -> dict[str, str]:
    """Return the tensors that were trained next to the adapters, by the last parts of their modules' names."""
    return {match[1]: name for name in _header(Path(folder)) if (match := _SAVED.fullmatch(name))}


def paths_of(paths: Iterable[str], module: str) -> list[str]:
    """Return the layers of an adapter that belong to a module: the language model, or an encoder and its projector.
    These are all layers if PEFT's model has a single part."""
    paths = list(paths)
    others = [path for path in paths if _OTHER_PARTS.search(path)]
    if not others:
        return paths
    return [path for path in paths if path not in others] if module == LANGUAGE else others


def unread_layers(paths: Iterable[str], module: str, layers: int, built: int) -> set[str]:
    """Return the adapter layers behind the last layer of `module` that is built, in an encoder whose features come from
    an earlier layer. Arguments as in `adapter_keys`."""
    numbers = {path: match for path in paths_of(paths, module) if (match := IN_LAYERS.search(path))}
    return {path for path, match in numbers.items() if built <= int(match[1]) < layers}


def adapted_paths(folder: Path) -> list[str]:
    """Return the layers with adapters, by their names in PEFT's model.

    Raises:
        UserError: the file is missing or damaged, or holds something else.
    """
    header, file = _header(folder), folder / WEIGHTS
    paths = adapter_paths(folder, header)
    if not paths:
        raise UserError(f"{file} holds no adapter")
    return list(paths.values())


def _header(folder: Path) -> Iterable[str]:
    """Return the names of the tensors of an adapter."""
    snapshot, file = snapshot_of(folder), folder / WEIGHTS
    try:
        if snapshot is not None and not snapshot.has(WEIGHTS) and WEIGHTS in snapshot.sizes():
            header = snapshot.read_header(WEIGHTS, str(folder))
        else:
            file = weights_file(folder)
            header = (read_header if file.name == WEIGHTS else read_bin_header)(file)
    except (Unreadable, OSError) as error:
        raise UserError(read_error(file, error)) from error
    return header


_INNER = ".base_layer"
_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of names of the tensors with the weights of all experts of a layer, in the order of their classes."""


def is_stack(path: str) -> bool:
    """True if an adapter belongs to a tensor with the weights of all experts (`target_parameters`)."""
    return path.endswith(_STACKS)


def stored_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the names of layers in the file of an adapter. PEFT wraps the module of a layer's experts for each of its
    tensors with an adapter, the first one innermost (peft 0.21.2, `ParamWrapper`)."""
    names = {path: path.rpartition(".")[0] if is_stack(path) else path for path in paths}
    for path, name in names.items():
        if path.endswith(_STACKS[0]) and f"{name}.{_STACKS[1].rpartition('.')[2]}" in names:
            names[path] = name + _INNER
    return names


def adapter_paths(folder: Path, tensors: Iterable[str]) -> dict[str, str]:
    """Return the layers with adapters by their names in the file, which `stored_names` returns.

    Args:
        tensors: names of the tensors in the file.

    Raises:
        UserError: a tensor belongs to something else.
    """
    stored: dict[str, None] = {}
    for name in tensors:
        match = TENSOR.fullmatch(name)
        if _SAVED.fullmatch(name):
            continue
        if match is None:
            raise UserError(f"{folder}: {name} is no tensor of a linear layer's adapter: {MERGE}")
        stored[match[1]] = None
    paths = {}
    for name in stored:
        experts = name.removesuffix(_INNER)
        if not experts.endswith(".experts"):
            paths[name] = name
            continue
        is_first = name.endswith(_INNER) or f"{name}{_INNER}" not in stored and _names_first_stack(folder)
        paths[name] = f"{experts}.{_STACKS[not is_first].rpartition('.')[2]}"
    return paths


def _names_first_stack(folder: Path) -> bool:
    try:
        targets = json.loads((folder / CONFIG).read_text()).get("target_parameters") or ()
    except (OSError, ValueError, AttributeError):
        return False  # `read_config` reports it
    return any(_STACKS[0].endswith(f".{str(target).rpartition('.')[2]}") for target in targets)


def weights_file(folder: Path) -> Path:
    """Return the file with the tensors of an adapter. Raises UserError if there is none."""
    file = next((folder / name for name in (WEIGHTS, BIN_WEIGHTS) if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder} has no {WEIGHTS} and no {BIN_WEIGHTS}: give the folder of an adapter of PEFT")
    return file


def read_config(folder: Path, paths: Iterable[str]) -> LoraConfig:
    """Return the config of the adapters of some layers, without their targets.

    Args:
        paths: names of the layers in PEFT's model.

    Raises:
        UserError: it cannot be read, is not supported (by its key), or ranks differ between layers.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        dropout = float(config.get("lora_dropout") or 0.0)
        rank = int(_common_value(file, config, "r", "rank_pattern", paths))
        alpha = float(_common_value(file, config, "lora_alpha", "alpha_pattern", paths))
        rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, re.error
    ) as error:  # fmt: skip
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file} cannot be read as a LoRA adapter of PEFT ({error!r}): give the folder of one"
        ) from error
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type is {config.get('peft_type')!r}, adapters here are LORA: {MERGE}")
    for key, value in config.items():
        if key in _READ | _WITHOUT_EFFECT or value in _NEUTRAL.get(key, (None, False, "", [], {})):
            continue
        raise UserError(f"{file}: {key} is {value!r}, which adapters here cannot represent: {MERGE}")
    start = config.get("init_lora_weights", True)
    if start not in _STARTS:
        raise UserError(f"{file}: init_lora_weights {start!r} changes the weights of the base model: {MERGE}")
    lora = LoraConfig(rank=rank, alpha=alpha, dropout=dropout, rslora=rslora, dora=dora)
    fault = next(lora.faults("lora"), None)
    if fault is not None or rank < 1:
        raise UserError(f"{file}: {fault or f'r is {rank}, and must be at least 1'}")
    return lora


def _common_value(file: Path, config: Mapping[str, Any], key: str, pattern: str, paths: Iterable[str]) -> Any:
    """Return the common value of all these layers, each that of the first matching pattern, else of `key`."""
    others = config.get(pattern) or {}
    values = {
        # As peft.utils.other.get_pattern_key matches them.
        path: next((value for part, value in others.items() if re.match(rf"(.*\.)?({part})$", path)), config[key])
        for path in paths
    } or {"": config[key]}
    if len(set(values.values())) > 1:
        first, *_, last = sorted(values, key=lambda path: values[path])
        raise UserError(
            f"{file}: {pattern} gives {first} {values[first]} and {last} {values[last]}, and adapters of a module here "
            f"have one value: {MERGE}"
        )
    return next(iter(values.values()))


def _targets(paths: Iterable[str], layers: int) -> list[str]:
    numbers_by_name: dict[str, set[int]] = {}
    targets = []
    for path in paths:
        last, number = path.rpartition(".")[2], IN_LAYERS.search(path)
        ours_of_path = next((ours for theirs, ours in _OF_PROJECTOR.items() if f".{path}".endswith(f".{theirs}")), None)
        if ours_of_path is not None:
            targets.append(f"input_projections.0.encoder{ours_of_path}")
            continue
        is_delta = path.endswith(_OF_DELTA)
        name = last if is_delta else _LAST.get(last, last)
        of_experts = is_stack(path) or "shared_expert" in path
        if is_stack(path):
            name = f"experts.{last}"
        elif of_experts:
            name = f"shared_experts.{last}"
        if number is None or not (is_delta or of_experts or name in _OURS):
            raise UserError(f"{path} is no layer that can have adapters here: {MERGE}")
        numbers_by_name.setdefault(name, set()).add(int(number[1]))
    for name, numbers in numbers_by_name.items():
        has_all_layers = numbers == set(range(layers))
        every = f"*.{name}" if "experts." in name else name
        targets += [every] if has_all_layers else [f"*.layers.{number}.*{name}" for number in sorted(numbers)]
    return sorted(targets)
