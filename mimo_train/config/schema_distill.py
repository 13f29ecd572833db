"""Keys of the teacher of `train.task=distill`: `distill`."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, value_faults
from mimo_train.config.schema_modules import MOST_RANKS, LayoutConfig

DISTILL, SFT = "distill", "sft"
"""The values of `train.task` with a teacher, and of the same model without one."""


@dataclass
class DistillConfig(Section):
    """The teacher of `train.task=distill`: a frozen model on ranks of its own choice. See docs/distillation.md."""

    teacher: str = ""
    """The teacher: a run, a checkpoint, a directory of `transformers`, or ORG/NAME of the hub."""
    layout: dict[str, LayoutConfig] = key(factory=dict)
    """Layouts of the teacher's modules. `language`: as the student's by default. Encoders: data parallel over the ranks
    of the teacher's first stage by default."""
    first_rank: dict[str, int] = key(factory=dict, at_most=MOST_RANKS)
    """First ranks of the teacher's modules. `language`: as the student's by default. Encoders: the teacher's first
    stage by default."""
    sequence_length: int = key(0, at_least=0, zero_means="as the run's")
    """Longest text of the teacher, as `data.sequence_length`."""
    weight: float = key(1.0, at_least=0, at_most=1)
    """Weight of the divergence; the cross entropy of the labels has the rest."""
    temperature: float = key(1.0, above=0, at_most=1000)
    """Divides the logits of both models before their softmax."""
    top_k: int = key(0, at_least=0, zero_means="the full vocabulary")
    """Compare the teacher's most likely tokens alone; all others count as one token."""

    def faults(self, task: str) -> Iterator[Fault]:
        """Yield invalid values, alone and together with `train.task`."""
        yield from value_faults(self, DISTILL)
        if task == DISTILL and not self.teacher:
            yield Fault("distill.teacher", "is empty. Set it to a run, checkpoint, directory or ORG/NAME of the hub")
        elif task != DISTILL and (changed := changed_fields(self)):
            yield Fault(f"distill.{changed[0]}", f"is for train.task=distill, and train.task is {task}. Remove it")
        for name, layout in self.layout.items():
            yield from layout.faults(f"distill.layout.{name}")
        for name, rank in self.first_rank.items():
            if rank < 0:
                yield Fault(f"distill.first_rank.{name}", f"must be at least 0, is {rank}")
