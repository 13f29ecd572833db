"""The checkpoint that a run resumes from, and whether its layout, model and data fit."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from mimo_train.check.findings import Report
from mimo_train.checkpoint import folders
from mimo_train.config import compose
from mimo_train.config.fault import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.layout import RunLayout, lay_out
from mimo_train.plan.run_dir import folder_fault

FREE_TO_CHANGE = {"name", "dropout", "init_std", "layernorm_epsilon", "pixel_mean", "pixel_std", "rope_base"}
"""Fields of specs that do not change which weights a model has."""


def add_run_dir(
    report: Report,
    cfg: ConfigContainer,
    layout: RunLayout | None,
    data_fingerprint: str | None,
    text_fingerprint: str | None,
) -> None:
    """Notes what the run resumes from, and faults a folder that cannot be written, and a checkpoint that does not fit
    the model or the data.

    `data_fingerprint`: of the training shards, or None where they could not all be read; `text_fingerprint`: of the
    tokenizer and its chat template, or None.
    """
    folder = Path(cfg.run.dir)
    unusable = folder_fault(folder)
    if unusable is not None:
        report.faults.append(unusable)
        return
    try:
        checkpoint = folders.chosen(folder, cfg.checkpoint.resume)
        folders.require_none_later(folder, checkpoint)
    except UserError as error:
        report.faults.append(Fault("checkpoint.resume", str(error).removeprefix("checkpoint.resume: ")))
        return
    if checkpoint is None:
        return
    try:
        record = folders.read_record(checkpoint)
    except UserError as error:
        report.faults.append(Fault("checkpoint.resume", str(error)))
        return
    try:
        before = compose.from_dict(record["config"])
        layout_before = lay_out(before)
        fingerprint = record["data_fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        report.warnings.append(
            f"resumes {checkpoint}, whose {folders.RECORD} cannot be read ({_first_line(error)}): "
            "whether model and data fit is not known"
        )
        return
    remedy = "use another run.dir"
    changes = list(_model_changes(before, cfg))
    if changes:
        report.faults.append(Fault("run.dir", f"{checkpoint} is of another model ({'; '.join(changes)}): {remedy}"))
    if data_fingerprint is not None and data_fingerprint != fingerprint:
        report.faults.append(
            Fault(
                "data.shards",
                f"are not those that {checkpoint} was trained on (fingerprint {data_fingerprint}, was {fingerprint}), "
                f"so the order of samples would not continue: give the same shards, or {remedy}",
            )
        )
    text = record.get("text_fingerprint", text_fingerprint)  # checkpoints of before it was kept have none
    if text_fingerprint is not None and text != text_fingerprint:
        report.faults.append(
            Fault(
                "data.tokenizer",
                f"tokenizer, chat template or placeholders are not those that {checkpoint} was trained with "
                f"(fingerprint {text_fingerprint}, was {text}), so the samples would have other tokens: give the same, "
                f"or {remedy}",
            )
        )
    if layout is not None and layout_before.modules != layout.modules:
        report.notes.append(
            f"resumes {checkpoint}, saved with another layout ({_describe(layout_before)}; now {_describe(layout)}): "
            "it is resharded on load"
        )
    else:
        report.notes.append(f"resumes {checkpoint}")


def _model_changes(before: ConfigContainer, now: ConfigContainer) -> Iterator[str]:
    if set(before.modules) != set(now.modules):
        yield f"modules were {', '.join(before.modules)}, are {', '.join(now.modules)}"
        return
    for name, module in now.modules.items():
        for part in ("encoder", "projector", "llm"):
            old, new = getattr(before.modules[name], part), getattr(module, part)
            if type(old) is not type(new):
                yield f"modules.{name}.{part} is of another kind"
            elif new is not None:
                for field in dataclasses.fields(new):
                    was, value = getattr(old, field.name), getattr(new, field.name)
                    if was != value and field.name not in FREE_TO_CHANGE:
                        yield f"modules.{name}.{part}.{field.name} was {was}, is {value}"
    if LANGUAGE not in now.modules or now.language.llm is None:
        return
    lengths = before.data.sequence_length, now.data.sequence_length
    if now.language.llm.position == "learned" and lengths[0] != lengths[1]:
        yield f"data.sequence_length was {lengths[0]}, is {lengths[1]}, with learned positions"


def _describe(layout: RunLayout) -> str:
    return ", ".join(f"{name} {sizes}" for name, sizes in layout.modules.items())


def _first_line(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error.faults[0])
    return (str(error) or type(error).__name__).splitlines()[0]
