"""Where a teacher comes from: its run, and what loads its weights."""

from dataclasses import dataclass

from data.storage.url import place_of
from data.text.tokens import Tokenizer
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.pretrained.hub import located
from mimo_train.evaluation.generation.source import Source, open_source
from mimo_train.layout.run import Run
from mimo_train.layout.teacher import teacher_run

KEY = "distill.teacher"


@dataclass(frozen=True)
class TeacherSource:
    """A teacher that can be built and loaded."""

    run: Run
    """The teacher's run: its model at its layout, over the samples of the student's run."""
    source: Source
    order_seed: int
    """Seed of the order of samples, the student's."""


def open_teacher(run: Run) -> TeacherSource:
    """Return the teacher of a run with `train.task=distill`.

    Raises:
        ConfigError: `distill` has faults in connection with the teacher.
        UserError: the teacher cannot be read.
    """
    cfg = run.cfg
    try:
        source = open_source(place_of(located(cfg.distill.teacher, KEY)), tokenizer=cfg.data.tokenizer)
    except ConfigError as error:
        raise ConfigError([Fault(KEY, str(fault).removeprefix("CHECKPOINT: ")) for fault in error.faults]) from error
    except UserError as error:
        raise UserError(f"{KEY}: {str(error).removeprefix('CHECKPOINT: ')}") from error
    return TeacherSource(teacher_run(run, source.cfg), source, cfg.run.seed)


def require_one_vocabulary(teacher: Tokenizer, student: Tokenizer) -> None:
    """Raise ConfigError unless both models have the same tokens."""
    if teacher.vocabulary_fingerprint != student.vocabulary_fingerprint:
        text = (
            f"its tokenizer ({teacher.text_size} tokens) is not data.tokenizer ({student.text_size} tokens). Choose a "
            "teacher with the same tokenizer"
        )
        raise ConfigError([Fault(KEY, text)])
