"""Write an exported directory's files next to the weights: config, generation config, tokenizer, processor."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from data.errors import DataError
from data.text.tokenizer_directory import make_readable_by_version_4, write_tokenizer
from data.text.tokens import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.composites import COMPOSITES
from mimo_train.config.pretrained.directory import Directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import MODEL
from mimo_train.inputs.datasets import placeholders_of

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names of dtypes in `transformers`, by ours."""
COPIED = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md", "LICENSE*", "NOTICE*"),
    "spk_dict.pt",
)
"""Files of the source directory that belong to a model in addition to its weights. Qwen2.5-Omni's class reads its
voices in spk_dict.pt."""
PROCESSOR = "processor_config.json"
PROCESSORS = (PROCESSOR, "preprocessor_config.json")
"""A directory with a processor has one of these."""
_BOTH_KINDS = ("Bit", "CLIP", "DINOv3ViT", "Llava", "LlavaNext", "LlavaOnevision", "Qwen2VL", "Siglip", "Siglip2")
"""Image processors on torchvision, which version 4 names `...Fast` and version 5 by the plain name."""
UNFINISHED = ".unfinished"
"""File in a directory that is incomplete because its writer is running or was killed."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin.index.json")


@contextmanager
def new_directory(folder: Path) -> Iterator[Path]:
    """Yield a new folder for a model, for this process alone; remove it if the block raises.

    Raises:
        UserError: it exists and is not empty, or another process uses it.
    """
    mark = folder / UNFINISHED
    if mark.exists():
        raise _unfinished(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--to: {folder} is there already: give a folder that is not, or an empty one")
    made = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError as error:
        raise _unfinished(folder) from error
    try:
        yield folder
        mark.unlink()
    except BaseException:
        with suppress(OSError):  # keep the first error; another process may have started to write here
            for path in list(folder.iterdir()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for path in made:
                path.rmdir()
        raise


def _unfinished(folder: Path) -> UserError:
    return UserError(
        f"--to: {folder} holds an export that is not whole: another process is writing it, or was killed: wait for it, "
        "or remove the folder, or give another one"
    )


def copy_files(source: Path, to: Path) -> None:
    """Copy a model's files except weights and config.json, readable by versions 4 and 5 of `transformers`."""
    for pattern in COPIED:
        for path in sorted(source.glob(pattern)):
            if path.name != "config.json" and not any(path.match(weights) for weights in WEIGHTS):
                shutil.copy2(path, to / path.name)
    make_readable_by_version_4(to)
    _name_image_processor(to)
    _complete_processor(source, to)


def _name_image_processor(to: Path) -> None:
    """Name the image processor by its version 4 torchvision class, which version 5 knows too."""
    file = to / PROCESSOR
    content = json.loads(file.read_text()) if file.is_file() else {}
    inner = content.get("image_processor")
    kind = inner.get("image_processor_type") if isinstance(inner, dict) else None
    if isinstance(inner, dict) and kind in {f"{name}ImageProcessor" for name in _BOTH_KINDS}:
        write_json(file, content | {"image_processor": inner | {"image_processor_type": f"{kind}Fast"}})


def _complete_processor(source: Path, to: Path) -> None:
    """Add processor keys that follow from the model's config; older directories lack them."""
    config, file = json.loads((source / "config.json").read_text()), to / PROCESSOR
    composite = COMPOSITES.get(config.get("model_type"))
    if composite is None or composite.processor is None or not any((to / name).is_file() for name in PROCESSORS):
        return
    content = json.loads(file.read_text()) if file.is_file() else {}
    missing = {key: value for key, value in composite.processor(config).items() if content.get(key) is None}
    if missing:
        file.write_text(json.dumps(content | missing, indent=2) + "\n")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def has_another_template(directory: Directory, tokenizer: Tokenizer) -> bool:
    """True if the files of a pretrained model have another chat template than the run, or no tokenizer."""
    if not (directory.has_tokenizer and isinstance(tokenizer, HuggingFaceTokenizer)):
        return True
    try:
        theirs = build_tokenizer(str(directory.folder), [])
    except DataError:  # of the template too
        return True
    assert isinstance(theirs, HuggingFaceTokenizer)
    is_chosen = tokenizer.template.is_own and not tokenizer.uses_its_template
    return is_chosen or bool(tokenizer.template_variables) or tokenizer.template_sources != theirs.template_sources


def write_run_tokenizer(cfg: ConfigContainer, tokenizer: Tokenizer, to: Path) -> None:
    """Write the run's tokenizer, with its chat template and media placeholders."""
    media: dict[str, list[int]] = {}
    for module, name in placeholders_of(cfg).items():
        media.setdefault(cfg.modules[module].encoder.kind, []).append(tokenizer.placeholder_id(name))
    write_tokenizer(tokenizer, cfg.data.tokenizer, to, media)


def write_config(to: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Write config.json so that versions 4 and 5 of `transformers` read the same model.

    Args:
        config: from the source directory, or made for the model.
        dtype: dtype of the weights: fp32, bf16 or fp16.
    """
    write_json(to / "config.json", readable_by_both(config, DTYPE_NAMES[dtype]))


def readable_by_both(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config with the keys of both versions. Version 5 has `rope_parameters` and `dtype`. Version 4 reads
    `rope_theta`, `rope_scaling` and `torch_dtype`, and silently uses defaults if they are missing."""
    parts = {key for key, value in config.items() if isinstance(value, dict) and key.endswith("_config")}
    parts -= {"per_layer_config"}  # keys of layers, by number
    both = {key: readable_by_both(value, dtype) if key in parts else value for key, value in config.items()}
    both |= {"dtype": dtype, "torch_dtype": dtype}
    rope = both.get("rope_parameters")
    by_kind = isinstance(rope, dict) and ("full_attention" in rope or "sliding_attention" in rope)
    # Other types with rotary positions by kind of layer are not in version 4, and their classes take no such keys.
    if isinstance(rope, dict) and (not by_kind or both.get("model_type") == "gemma3_text"):
        both |= _rope_of_version_4(rope)
    if both.get("model_type") == "qwen3_moe" and "num_local_experts" in both:
        both.setdefault("num_experts", both["num_local_experts"])
    return both


def _rope_of_version_4(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and, for models with two kinds of layers, `rope_local_base_freq`."""
    if "full_attention" in rope or "sliding_attention" in rope:
        full_attention = _rope_of_version_4(rope.get("full_attention") or {})
        local = rope.get("sliding_attention") or {}
        return full_attention | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", "default")
    plain = kind == "default" and set(scaling) <= {"rope_type"}
    full_attention = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return full_attention | {"rope_scaling": None if plain else {**scaling, "type": kind}}


def hub_names(
    module: MegatronModule, state: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a language model of transformers (`models.transformers_lm`) by their hub names."""
    from encoders.transformers_media.directory import hub_state

    return hub_state(module.get_submodule(MODEL.removesuffix(".")), state, dtype)
