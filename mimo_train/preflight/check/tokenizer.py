"""The run's tokenizer: whether it can be built, and whether the weights were trained with it."""

from typing import Any

from data.errors import DataError
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.inputs import has_another_tokenizer, tokenizer_of
from mimo_train.preflight.check.findings import Report, without_key


def build_tokenizer(report: Report, cfg: ConfigContainer) -> Any | None:
    """The run's tokenizer, or None and a fault."""
    if any(fault.key == "data.tokenizer" for fault in report.faults):
        return None
    try:
        return tokenizer_of(cfg)
    except DataError as error:
        # Its template and its variables have keys of their own.
        key = str(error).partition(":")[0]
        keys = ("data.chat_template", "data.template_variables", "data.special_tokens_in_text")
        key = key if key in keys else "data.tokenizer"
        report.faults.append(Fault(key, without_key(error, key)))
        return None


def tokenizer_rows(report: Report, cfg: ConfigContainer, tokenizer: Any | None) -> list[tuple[str, ...]]:
    """Rows of the table of the data. What the tokenizer says of itself, and that it is not the one of the language
    model's directory, are warnings."""
    if not tokenizer:
        return [("data.tokenizer", "at fault", "")]
    report.warnings += [f"data.chat_template: {note}" for note in tokenizer.template.notes]
    _add_another(report, cfg, tokenizer)
    return [
        ("data.tokenizer", cfg.data.tokenizer, f"{tokenizer.vocab_size:,} ids"),
        ("data.chat_template", cfg.data.chat_template, tokenizer.template.name),
    ]


def _add_another(report: Report, cfg: ConfigContainer, tokenizer: Any) -> None:
    folder = cfg.modules[LANGUAGE].pretrained
    if not folder:
        return
    try:
        directory = read_directory(folder, f"modules.{LANGUAGE}.pretrained")
    except ConfigError:  # its own fault
        return
    if has_another_tokenizer(directory, cfg, tokenizer):
        report.warnings.append(
            f"data.tokenizer: {cfg.data.tokenizer} is not the tokenizer of modules.{LANGUAGE}.pretrained={folder}: the "
            "rows of its vocabulary were trained for other tokens; leave data.tokenizer out to take the directory's"
        )
