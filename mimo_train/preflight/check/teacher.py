"""The teacher of `train.task=distill` in the report: its modules, ranks and memory, and its faults."""

from dataclasses import replace
from typing import Any

from data.errors import DataError
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.estimate.activations import BYTES
from mimo_train.estimate.memory import GIB, stage_memory
from mimo_train.estimate.parameters import ParameterCount, embedding_rows, module_parameters
from mimo_train.inputs.datasets import tokenizer_of
from mimo_train.layout.placement import span_text
from mimo_train.layout.run import Run
from mimo_train.preflight.check.report import Report, Table
from mimo_train.training.teacher.source import KEY, open_teacher, require_one_vocabulary


def add_teacher(report: Report, run: Run, tokenizer: Any | None) -> None:
    """Add the teacher of a run that has one. `tokenizer`: the run's; None if it cannot be built."""
    if not run.cfg.traits.has_teacher or not run.cfg.distill.teacher:
        return
    try:
        teacher = open_teacher(run).run
        theirs = tokenizer_of(teacher.cfg)
        if tokenizer is not None:
            require_one_vocabulary(theirs, tokenizer)
    except ConfigError as error:
        report.faults += error.faults
        return
    except (UserError, DataError) as error:
        report.faults.append(Fault(KEY, str(error).removeprefix(f"{KEY}: ")))
        return
    report.tables.append(_table(run, teacher, embedding_rows(teacher.cfg.llm, theirs.vocab_size)))


def _table(run: Run, teacher: Run, vocab: int) -> Table:
    cfg, layout = teacher.cfg, teacher.layout
    rows = []
    for name, module in layout.modules.items():
        count = sum(module_parameters(cfg, name, vocab).values(), ParameterCount(0, 0)).total
        # Nothing is kept for a backward pass.
        memory = max(stage.memory.weights + stage.memory.work for stage in stage_memory(_frozen(teacher), name, vocab))
        ranks = span_text(layout.processes_of(module.ranks))
        rows.append((name, str(module), ranks, f"{count:,}", f"{memory / GIB:.3f}"))
    student, llm = run.layout.language, cfg.llm
    head = vocab // student.tp * llm.hidden_size * BYTES[cfg.train.precision]
    ranks = span_text(run.layout.processes_of(student.stage_ranks(student.pp - 1)))
    notes = [
        f"{run.cfg.distill.teacher}; in {cfg.train.precision}, next to the memory of the run's modules",
        f"ranks {ranks} have its output layer too, {head / GIB:.3f} GiB each",
    ]
    return Table("Teacher", ("module", "layout", "ranks", "parameters", "GiB a rank"), rows, notes, left=3)


def _frozen(teacher: Run) -> Run:
    parts = {name: ["llm"] if name == LANGUAGE else ["encoder", "projector"] for name in teacher.cfg.modules}
    modules = {name: replace(module, freeze=parts[name]) for name, module in teacher.cfg.modules.items()}
    return replace(teacher, cfg=replace(teacher.cfg, modules=modules))
