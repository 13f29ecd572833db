"""Check that a checkpoint belongs to this run: model, tokenizer, shards and order of samples.

`train` and `mimo-train check` share these checks, so that they always agree.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.storage.url import Place
from data.text_format import plural
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.damage import damaged
from mimo_train.checkpoint.folders import LEFT_OUT, RECORD, read_record
from mimo_train.checkpoint.resume.config_diff import changed_numbers, initial_weights, model_changes, module_changes
from mimo_train.config.compose import from_dict, to_dict
from mimo_train.config.errors import Fault
from mimo_train.config.parts import LANGUAGE, PARTS, parts_of
from mimo_train.config.pretrained.hub import locate, recorded_names, replace_names, say
from mimo_train.config.removed import without_removed
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.user_code import require_trusted


def resume_faults(
    folder: Place,
    record: dict[str, Any],
    cfg: ConfigContainer,
    *,
    data_fingerprint: str | None,
    text_fingerprint: str | None,
    data_size: tuple[int, int] | None = None,
) -> list[Fault]:
    """Return why a run cannot resume from a checkpoint. Unknown (None) values are not compared.

    Args:
        record: record of the checkpoint in `folder`.
        data_fingerprint: fingerprint of this run's shards.
        text_fingerprint: fingerprint of this run's tokenizer, chat template and placeholders.
        data_size: (shards, samples) of this run.

    Raises:
        UserError: the record has no config.
    """
    home = "checkpoint.dir" if cfg.checkpoint.dir else "run.dir"
    key = home if cfg.checkpoint.resume == "auto" else "checkpoint.resume"
    before, faults = _config(folder, record), []
    with _record_checked(folder):
        changes = "; ".join(model_changes(before, cfg))
    if changes:
        faults.append(
            Fault(
                key,
                f"checkpoint {folder} is of another model: {changes}; give the config that it was saved with, or begin "
                f"a new run in another {home} (with what fits of its weights: checkpoint.weights={folder})",
            )
        )
    faults += _other_text(
        "tokenizer, chat template or placeholders are not those",
        folder,
        record.get("text_fingerprint"),  # older records have none
        text_fingerprint,
        "give the same data.tokenizer, data.chat_template, data.template_variables and modules.*.placeholder. If they "
        "are the same, an earlier version saved it, which read records with media as other tokens: continue with that "
        f"version, or begin a new run in another {home} with its weights: checkpoint.weights={folder}",
    )
    was = record.get("data_fingerprint")
    if data_fingerprint is not None and data_fingerprint != was:
        faults.append(
            Fault(
                "data.mix" if cfg.data.mix else "data.shards",
                f"the shards are not those of checkpoint {folder}: {_other_shards(before, record, cfg, data_size)}, so "
                "the order of samples would not continue: give the same shards, or begin a new run with these in "
                f"another {home}, with its weights: checkpoint.weights={folder}",
            )
        )
    for name, old, new in (
        ("run.seed", before["run"]["seed"], cfg.run.seed),
        ("data.shuffle", before["data"]["shuffle"], cfg.data.shuffle),
        # Older records without the key had an order without blocks.
        ("data.shuffle_block", before["data"].get("shuffle_block", 1), cfg.data.shuffle_block),
    ):
        if old != new:
            faults.append(
                Fault(
                    name,
                    f"is {new}, and checkpoint {folder} was trained with {old}, so the order of samples would not "
                    f"continue: set {name}={str(old).lower()}, or give another {home}",
                )
            )
    faults += _other_samples(folder, before["data"], cfg, home)
    faults += _other_optimizers(folder, before, cfg, home)
    return faults + list(_other_stages(folder, before["modules"], cfg, home))


def unread_weights(folder: Place, record: dict[str, Any], cfg: ConfigContainer) -> str:
    """Return a sentence about initial weights that are configured but not read because the run resumes; or empty.

    Weights that the start which saved the checkpoint had too are not named. Requires that `resume_faults` is empty;
    arguments and errors as there.
    """
    before = _config(folder, record)
    with _record_checked(folder):
        if before["checkpoint"].get("trained_only"):
            return ""  # they are read again and compared
        earlier = initial_weights(before)
    unread = [f"{key}={value}" for key, value in initial_weights(to_dict(cfg)).items() if value != earlier.get(key)]
    if not unread:
        return ""
    home = "checkpoint.dir" if cfg.checkpoint.dir else "run.dir"
    return (
        f"{', '.join(unread)}: not read, since this run continues with its own weights; in another {home} a run begins "
        "with them"
    )


def config_changes(folder: Place, record: dict[str, Any], cfg: ConfigContainer) -> str:
    """Return the config changes of a resumed run that affect its numbers, key by key; or empty. Requires that
    `resume_faults` is empty; arguments and errors as there."""
    before = without_removed(_config(folder, record), only_defaults=True)
    with _record_checked(folder):
        return "; ".join(changed_numbers(before, cfg))


@contextmanager
def _record_checked(folder: Place) -> Iterator[None]:
    """Turn errors of comparing with a recorded config into damage: the marker only proves that it is unchanged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{RECORD} holds no config of modules ({error!r})") from error


def _other_optimizers(folder: Place, before: dict[str, Any], cfg: ConfigContainer, home: str) -> Iterator[Fault]:
    """Yield faults of modules whose optimizer keeps other states."""
    for name in cfg.modules:
        own = before["modules"].get(name, {}).get("optim") or {}
        old = own.get("name") or before.get("optim", {}).get("name", "adamw")
        if old != cfg.optim_of(name).name:
            yield Fault(
                "optim.name",
                f"is {cfg.optim_of(name).name} for {name}, and checkpoint {folder} was trained with {old}, which has "
                f"other states: set {old}, or begin a new run in another {home} with checkpoint.weights={folder}",
            )


def _other_samples(folder: Place, before: dict[str, Any], cfg: ConfigContainer, home: str) -> Iterator[Fault]:
    """Yield faults of keys that change the samples of the same shards.

    Args:
        before: `data` of the checkpoint's config. A key that it lacks was added later and means its default.
    """
    now = asdict(cfg.data)
    before = asdict(DataConfig()) | before
    for at, (old, new) in enumerate(zip(_fields_of(before), _fields_of(now), strict=False)):
        if old != new:
            key = f"data.mix[{at}].fields" if now["mix"] and now["mix"][at]["fields"] else "data.fields"
            yield _samples_fault(key, folder, old, new, home)
    for name in ("video", "null_captions", "background", "blind", "separate_documents"):
        if before[name] != now[name]:
            yield _samples_fault(f"data.{name}", folder, before[name], now[name], home)


def _other_stages(folder: Place, before: dict[str, Any], cfg: ConfigContainer, home: str) -> Iterator[Fault]:
    """Yield faults of changed stages: optimizer moments exist only for the parts that the run has trained.

    Args:
        before: `modules` of the checkpoint's config.
    """
    for name, module in cfg.modules.items():
        was = before.get(name, {}).get("freeze") or []
        freed = [part for part in parts_of(name) if part in was and part not in module.freeze]
        # Patterns and adapters are resolved only when the model is built.
        if freed and module.lora.rank == 0 and all(entry in PARTS for entry in module.freeze):
            yield Fault(
                f"modules.{name}.freeze",
                f"is {module.freeze}, and checkpoint {folder} was trained with {was}, so that it has no optimizer "
                f"states of {' and '.join(freed)}: set it to that, or begin a new run in another {home} with its "
                f"weights: checkpoint.weights={folder}",
            )
        old, new = before.get(name, {}).get("freeze_until") or {}, module.freeze_until
        if old != new:
            yield Fault(
                f"modules.{name}.freeze_until",
                f"is {new}, and checkpoint {folder} was trained with {old}: set it to that, or begin a new run in "
                f"another {home} with its weights: checkpoint.weights={folder}",
            )


def _fields_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [source.get("fields") or data.get("fields") or {} for source in data.get("mix") or [{}]]


def _samples_fault(key: str, folder: Place, old: Any, new: Any, home: str) -> Fault:
    return Fault(
        key,
        f"is {new}, and checkpoint {folder} was trained with {old}, so the samples would be others: give the same, or "
        f"another {home}",
    )


def _other_shards(
    before: dict[str, Any], record: dict[str, Any], cfg: ConfigContainer, size: tuple[int, int] | None
) -> str:
    changes, was, now = [], record.get("data_size"), asdict(cfg.data)
    # The last two cut .bin and .idx files into samples.
    for name in ("shards", "mix", "validation_fraction", "sequence_length", "split"):
        old, new = before["data"].get(name, now[name]), now[name]
        if old != new:
            changes.append(f"data.{name} was {old or 'empty'}, is {new or 'empty'}")
    if size is not None and isinstance(was, list) and len(was) == 2:
        had, have = (f"{plural(shards, 'shard')} with {plural(samples, 'sample')}" for shards, samples in (was, size))
        same = f"there are {have} as before, and names, sizes or contents are others"
        changes.append(same if had == have else f"there were {had}, and are {have}")
    return "; ".join(changes) or "names, sizes, contents or counts of samples are others"


def left_behind(cfg: ConfigContainer) -> list[Fault]:
    """Return the fault of a run that would start anew in `checkpoint.dir` while `run.dir` has checkpoints."""
    if not cfg.checkpoint.dir or cfg.checkpoint.resume != "auto":
        return []
    newest = folders.newest(Path(cfg.run.dir))
    if newest is None:
        return []
    return [
        Fault(
            "checkpoint.dir",
            f"{cfg.checkpoint.dir} has no checkpoint, and run.dir has {newest}: continue from there with "
            f"checkpoint.resume={cfg.run.dir}, or begin a new run in another run.dir",
        )
    ]


def weights_faults(
    folder: Place, record: dict[str, Any], cfg: ConfigContainer, *, vocabulary_fingerprint: str | None
) -> list[Fault]:
    """Return why a new run cannot start with a checkpoint's weights (`checkpoint.weights`). Arguments and errors as in
    `resume_faults`; the fingerprint covers the vocabulary only."""
    faults = []
    with _record_checked(folder):
        changes = "; ".join(model_changes(_config(folder, record), cfg, new_run=True))
    if changes:
        faults.append(
            Fault(
                "checkpoint.weights",
                f"checkpoint {folder} is of another model: {changes}; give the config that it was saved with",
            )
        )
    remedy = "give the tokenizer that these weights were trained with"
    was = record.get("vocabulary_fingerprint")
    return faults + _other_text("it is not the tokenizer", folder, was, vocabulary_fingerprint, remedy)


def module_faults(
    folder: Place,
    record: dict[str, Any],
    cfg: ConfigContainer,
    name: str,
    *,
    vocabulary_fingerprint: str | None,
) -> tuple[list[Fault], list[str]]:
    """Return why a module cannot start with a checkpoint's weights (`checkpoint.load_modules`).

    Args:
        name: module in this run. Other arguments as in `weights_faults`.

    Returns:
        Faults; and differences between the models, which are faults only with `strict`.
    """
    load, key = cfg.checkpoint.load_modules[name], f"checkpoint.load_modules.{name}"
    before, source = _config(folder, record), load.source(name)
    if source not in before["modules"]:
        modules = ", ".join(before["modules"])
        return [Fault(f"{key}.module", f"checkpoint {folder} has no module {source!r}, it has {modules}")], []
    with _record_checked(folder):
        changes = list(module_changes(before, source, cfg.modules[name], f"modules.{name}"))
    faults = []
    if changes and load.strict:
        faults.append(
            Fault(
                key,
                f"checkpoint {folder} is of another model: {'; '.join(changes)}; give the same config of the module, "
                f"or take what fits: {key}.strict=false",
            )
        )
    if name == LANGUAGE:
        remedy = "give the tokenizer that these weights were trained with"
        was = record.get("vocabulary_fingerprint")
        faults += _other_text("it is not the tokenizer", folder, was, vocabulary_fingerprint, remedy)
    return faults, changes


def _other_text(what: str, folder: Place, was: str | None, now: str | None, remedy: str) -> list[Fault]:
    if was is None or now is None or was == now:
        return []
    return [
        Fault(
            "data.tokenizer",
            f"{what} of checkpoint {folder} (fingerprint {now}, was {was}), so the same text would be other tokens: "
            f"{remedy}",
        )
    ]


def _config(folder: Place, record: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a record; all versions have written the keys checked here."""
    config = record.get("config")
    if not isinstance(config, dict):
        raise damaged(folder, f"{RECORD} holds no config")
    for section, name in (("run", "seed"), ("data", "shuffle"), ("modules", "language")):
        if not isinstance(config.get(section), dict) or name not in config[section]:
            raise damaged(folder, f"{RECORD} has no config.{section}.{name}")
    return config


_REMEDY = (
    "if it is yours, or you trust whoever made the checkpoint, say so with --trust-code; an encoder that an installed "
    "package registers needs no such word (docs/your-encoder.md)"
)


def recorded_config(folder: Place, *, trust_code: bool, weights: bool = False) -> ConfigContainer:
    """Return the config in a checkpoint's record, without callbacks, forward step and removed keys.

    Models of the Hugging Face hub are downloaded again if they are missing. If that fails, a notice says so, and
    their folders count as missing.

    Args:
        trust_code: True to import encoders that it names by path.
        weights: download their weights too. They are if the checkpoint leaves weights out.

    Raises:
        UserError: the record is damaged, or names code that is not trusted.
    """
    record = read_record(folder, "config")
    plain = _plain(folder, record)
    try:
        if not trust_code:
            require_trusted(plain, str(folder / RECORD), (), _REMEDY)
        models, faults = locate(recorded_names(plain), {}, weights=weights or LEFT_OUT in record)
        for fault in faults:
            say(str(fault))
        replace_names(plain, models)
        return from_dict(plain)
    except RecursionError as error:
        raise damaged(folder, f"{RECORD} nests its config without end") from error


def config_if_trusted(folder: Place, record: dict[str, Any], trusted: Collection[str]) -> ConfigContainer:
    """Return `recorded_config` from a loaded record; the user's own config names the `trusted` code."""
    plain = _plain(folder, record)
    require_trusted(plain, str(folder / RECORD), trusted, "the config of this run does not name it")
    return from_dict(plain)


def _plain(folder: Place, record: dict[str, Any]) -> dict[str, Any]:
    plain = record["config"]
    if not isinstance(plain, dict):
        raise damaged(folder, f"{RECORD} holds no config, but {type(plain).__name__}")
    plain = without_removed(plain)
    train = plain.get("train")
    return {**plain, "train": {**train, "callbacks": [], "forward_step": ""}} if isinstance(train, dict) else plain
