"""The held-out sets that an evaluation measures: those of the run, of another config, or shards."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from mimo_train.config import compose
from mimo_train.config.errors import UserError
from mimo_train.config.run_files import SUFFIXES, shipped_configs
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.inputs.datasets import HeldOutSet, splits_of

OF_MODEL = {
    *("sequence_length", "pad", "pack", "pack_length", "separate_documents", "tokenizer", "chat_template"),
    *("template_variables", "special_tokens_in_text", "background", "video", "bounds", "blind"),
}
"""Keys of `data` that say how the model reads samples. Another config does not change them."""


def with_data(cfg: ConfigContainer, data: str) -> ConfigContainer:
    """Return the config with other samples, read as the model reads them: answers, or pairs for a value head.

    Args:
        data: a shipped config or a YAML file, whose samples are taken; or shards, in the forms of `data.shards`; empty:
            the samples of the run.

    Raises:
        ConfigError: the other config has errors.
    """
    if not data:
        return cfg
    if not cfg.traits.value_head:
        cfg = cfg.as_sft()
    if data.endswith(SUFFIXES) or (shipped_configs() / f"{data}.yaml").is_file():
        other = compose.load(data, weights=False).data
        names = [item.name for item in fields(DataConfig) if item.name not in OF_MODEL]
        return replace(cfg, data=replace(cfg.data, **{name: getattr(other, name) for name in names}))
    kept = {name: getattr(cfg.data, name) for name in (*OF_MODEL, "fields", "workers", "max_bad_samples", "cache_dir")}
    return replace(cfg, data=DataConfig(**kept, shards=data, validation_shards=data))


def chosen_sets(cfg: ConfigContainer, split: str = "", limit: int | None = None) -> list[HeldOutSet]:
    """Return the held-out sets of a config, or the one named `split`, see `splits_of`.

    Args:
        limit: samples per set; 0: all; None: as the config says.

    Raises:
        UserError: there are none, or there is no such set.
    """
    splits = splits_of(cfg)
    if not splits:
        raise UserError("--data: the config has no held-out samples. Give shards, or a config with held-out sets")
    if split and split not in splits:
        raise UserError(f"--split: no set {split!r}. Choose from {', '.join(splits)}")
    sets = [splits[split]] if split else list(dict.fromkeys(splits.values()))
    return sets if limit is None else [replace(of, samples=limit) for of in sets]


def fitting_length(cfg: ConfigContainer, sets: Sequence[HeldOutSet], new_tokens: int) -> int:
    """Return the shortest `data.sequence_length` that cuts no sample and leaves room for answers, at most the config's.
    Reads the texts.

    Args:
        new_tokens: longest answer.
    """
    from mimo_train.inputs.datasets import build_dataset, tokenizer_of

    tokenizer, longest = tokenizer_of(cfg), 1
    for of in sets:
        dataset = build_dataset(cfg, tokenizer, held_out=of)
        try:
            samples = min(of.samples or len(dataset), len(dataset))
            longest = max(longest, *(dataset.read_text(number)[0].length for number in range(samples)))
        finally:
            dataset.close()
    layout = cfg.language.layout
    # Parts of context and sequence parallelism, in the units of kernels.
    unit = 64 * 2 * layout.cp * layout.tp
    return min(math.ceil((longest + new_tokens) / unit) * unit, cfg.data.sequence_length)


def output_folder(run_dir: Path | None, name: str) -> Path:
    """Return the next unused folder for the files of an evaluation of checkpoint `name`."""
    parent = (run_dir or Path()) / "evaluations"
    number, folder = 1, parent / name
    while folder.exists():
        number += 1
        folder = parent / f"{name}.{number}"
    return folder
