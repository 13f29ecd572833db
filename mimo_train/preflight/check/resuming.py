"""The checkpoint that a run resumes from, or whose weights it starts from, and checks that it fits the run."""

from pathlib import Path
from typing import Any

from data.storage.url import Place, place_of
from data.text_format import listed
from encoders.errors import EncoderError
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.folders import LEFT_OUT, base_of
from mimo_train.checkpoint.resume.same_run import (
    config_changes,
    config_if_trusted,
    left_behind,
    module_faults,
    resume_faults,
    unread_weights,
    weights_faults,
)
from mimo_train.config.compose import to_dict
from mimo_train.config.errors import Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.paths import folder_fault
from mimo_train.config.pretrained.fill_in import pretrained_folders
from mimo_train.config.pretrained.hub import NoHeadersError, tensors_of
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import TransformersLlm, unlike
from mimo_train.config.user_code import code_named
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.matching import SHOWN, MatchedPart, require_no_others
from mimo_train.hf.parts import pretrained_parts
from mimo_train.layout.ranks import RunLayout, lay_out
from mimo_train.layout.run import all_made
from mimo_train.preflight.check.report import Report


def add_run_dir(
    report: Report,
    cfg: ConfigContainer,
    layout: RunLayout | None,
    data_fingerprint: str | None,
    tokenizer: Any | None,
    *,
    without_data: bool = False,
) -> None:
    """Note what the run resumes from. Report a folder that cannot be written, and a checkpoint that does not fit the
    model, the tokenizer or the data.

    Args:
        data_fingerprint: fingerprint of the training shards; None if some cannot be read.
        tokenizer: the tokenizer of the run; None if it cannot be loaded.
        without_data: skip weights in Hugging Face directories, which may be missing.
    """
    folder = Path(cfg.run.dir)
    unusable = folder_fault(folder)
    if unusable is not None:
        report.faults.append(unusable)
        return
    key = "checkpoint.resume"
    try:
        saves = place_of(cfg.checkpoint.dir) if cfg.checkpoint.dir else folder
        if cfg.checkpoint.resume == "auto":
            checkpoint, passed_over = folders.newest_readable(saves)
            report.warnings += [f"{damage}; a run sets it aside" for damage in passed_over]
        else:
            checkpoint = folders.chosen(saves, cfg.checkpoint.resume)
            if checkpoint is not None:
                folders.require_files(checkpoint)
        reads_directories = not cfg.checkpoint.weights
        if checkpoint is None:
            report.faults += left_behind(cfg)
        if checkpoint is not None:
            record = folders.read_record(checkpoint)
            reads_directories = LEFT_OUT in record
            _add_base(report, checkpoint, cfg.checkpoint.weights)
            resume_errors = resume_faults(
                checkpoint,
                record,
                cfg,
                data_fingerprint=data_fingerprint,
                text_fingerprint=tokenizer and tokenizer.fingerprint,
            )
            report.faults += resume_errors
            code_names = [name for names in code_named(to_dict(cfg)).values() for name in names]
            _note(report, checkpoint, record, layout, code_names)
            # Without data, the steps of train.epochs are unknown; a checkpoint records them.
            is_length_known = not resume_errors and (cfg.train.iters or not cfg.train.epochs)
            if is_length_known and record.get("step", 0) >= cfg.train.iters:
                report.warnings.append(all_made(cfg.train, record["step"]))
            if is_length_known and (changes := config_changes(checkpoint, record, cfg)):
                report.notes.append(f"results will differ from the original run from there on: {changes}")
            if not resume_errors and (unread := unread_weights(checkpoint, record, cfg)):
                report.warnings.append(unread)
        elif cfg.checkpoint.weights:
            key = "checkpoint.weights"
            checkpoint = folders.in_folder(place_of(cfg.checkpoint.weights), key)
            folders.require_files(checkpoint)
            _add_base(report, checkpoint)
            vocabulary = tokenizer and tokenizer.vocabulary_fingerprint
            record = folders.read_record(checkpoint)
            report.faults += weights_faults(checkpoint, record, cfg, vocabulary_fingerprint=vocabulary)
            left = [f"modules.{name}" for name in record["config"]["modules"] if name not in cfg.modules]
            without = f" without {' and '.join(left)}" if left else ""
            report.notes.append(f"starts from the weights of {checkpoint}{without}")
        if reads_directories and not without_data:
            _add_pretrained(report, cfg)
        if checkpoint is None or key == "checkpoint.weights":
            for name in cfg.checkpoint.load_modules.keys() & cfg.modules.keys():
                key = f"checkpoint.load_modules.{name}.path"
                _add_module(report, cfg, name, tokenizer and tokenizer.vocabulary_fingerprint)
    except UserError as error:
        report.faults.append(Fault(key, str(error).removeprefix(f"{key}: ")))


def _add_base(report: Report, checkpoint: Place, weights: str = "") -> None:
    """Report faults of the checkpoint with the weights that another one leaves out. Arguments as in `base_of`."""
    try:
        base = base_of(checkpoint, weights)
        if base is not None:
            folders.require_files(base)
    except UserError as error:
        key = "checkpoint.weights"
        report.faults.append(Fault(key, str(error).removeprefix(f"{key}: ")))


def _add_pretrained(report: Report, cfg: ConfigContainer) -> None:
    faults, tensors, is_read = [], {}, True
    for key, folder in pretrained_folders(cfg).items():
        try:
            tensors[Path(folder)] = tensors_of(Path(folder), key)
        except NoHeadersError as error:
            is_read = False
            report.notes.append(str(error))
        except UserError as error:
            faults.append(Fault(key, str(error).removeprefix(f"{key}: ")))
    report.faults += faults
    if faults or not is_read or any(fault.key.startswith("modules") for fault in report.faults):
        return
    key = ""
    llm, language = cfg.language.llm, cfg.language.pretrained
    if isinstance(llm, TransformersLlm) and language:
        shapes = {name: entry.shape for name, entry in tensors[Path(language)].items()}
        if wrong := unlike(llm.model_config, shapes):
            text = f"the tensors of {language} are not those of its config.json: {listed(wrong, SHOWN, between='; ')}"
            report.faults.append(Fault(f"modules.{LANGUAGE}.pretrained", f"{text}. Copy the directory again"))
    try:
        parts = pretrained_parts(cfg, embedding_rows(cfg.llm, cfg.llm.vocab_size))
        matched = []
        for part in parts:
            key = part.key
            matched.append((part, MatchedPart(part.folder, tensors[part.folder], part.weights, key)))
        require_no_others(matched)
    except (UserError, EncoderError) as error:
        named, _, message = str(error).partition(": ")
        report.faults.append(Fault(named, message) if named.startswith("modules.") else Fault(key, str(error)))


def _add_module(report: Report, cfg: ConfigContainer, name: str, vocabulary: str | None) -> None:
    load = cfg.checkpoint.load_modules[name]
    checkpoint = folders.in_folder(place_of(load.path), f"checkpoint.load_modules.{name}.path")
    folders.require_files(checkpoint)
    record = folders.read_record(checkpoint)
    faults, changes = module_faults(checkpoint, record, cfg, name, vocabulary_fingerprint=vocabulary)
    report.faults += faults
    if not load.strict:
        report.warnings += [f"checkpoint.load_modules.{name}: {change}" for change in changes]
    report.notes.append(f"modules.{name} starts from the weights of {load.source(name)} in {checkpoint}")


def _note(
    report: Report, checkpoint: Place, record: dict[str, Any], layout: RunLayout | None, own_code: list[str]
) -> None:
    try:
        before = lay_out(config_if_trusted(checkpoint, record, own_code))
    except (ValueError, KeyError, TypeError):
        before = None  # saved by another version; the relevant parts were compared
    if layout is not None and before is not None and before.modules != layout.modules:
        report.notes.append(
            f"resumes {checkpoint}, saved with another layout ({_describe(before)}; now {_describe(layout)}): "
            "it is resharded on load"
        )
    else:
        report.notes.append(f"resumes {checkpoint}")


def _describe(layout: RunLayout) -> str:
    return ", ".join(f"{name} {sizes}" for name, sizes in layout.modules.items())
