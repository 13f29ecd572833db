"""Tasks by the name of `train.task`: what each reads and needs, and the keys of those that compare answers
(`preference`). Their losses are in `mimo_train/training/tasks/`."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, value_faults


@dataclass(frozen=True)
class TaskTraits:
    """What a task reads from the data and needs from the model."""

    form: str = "turns"
    """Records: `turns` (one answer), `pairs` (chosen and rejected answer) or `labels` (an answer with a label)."""
    needs_reference: bool = False
    """True if the loss takes log-probabilities of a reference model."""
    keys: tuple[str, ...] = ()
    """Keys of the section `preference` that the loss uses."""
    value_head: bool = False
    """True if the model ends in one number for each token, not in logits."""
    rare_metrics: tuple[str, ...] = ()
    """Metrics that a step may have no sample of: means over the samples of a log interval."""
    has_teacher: bool = False
    """True if a frozen model next to the run's modules gives part of the loss (`distill`)."""

    @property
    def answers(self) -> int:
        """Token sequences of a sample; with `labels` the second is a mismatched answer, for the KL term."""
        return 1 if self.form == "turns" else 2


TASKS = {
    "sft": TaskTraits(),
    "distill": TaskTraits(has_teacher=True),
    "dpo": TaskTraits("pairs", needs_reference=True, keys=("beta", "label_smoothing", "sft_weight")),
    "ipo": TaskTraits("pairs", needs_reference=True, keys=("beta", "sft_weight")),
    "simpo": TaskTraits("pairs", keys=("beta", "gamma", "label_smoothing", "sft_weight")),
    "orpo": TaskTraits("pairs", keys=("beta",)),
    "kto": TaskTraits(
        "labels",
        needs_reference=True,
        keys=("beta", "desirable_weight", "undesirable_weight"),
        rare_metrics=("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"),
    ),
    "reward": TaskTraits("pairs", value_head=True, keys=("center_rewards",)),
}
"""Tasks by the name of `train.task`."""


@dataclass
class PreferenceConfig(Section):
    """Losses that compare answers, by TRL's names and defaults. See docs/preferences.md."""

    beta: float = key(0.1, above=0)
    """Scale of rewards; more of it keeps closer to the reference. `orpo`: weight of the odds ratio."""
    gamma: float = key(0.5, at_least=0)
    """Reward margin that `simpo` aims at."""
    label_smoothing: float = key(0.0, at_least=0, below=0.5)
    """Probability that the answers of a pair are swapped, for `dpo` and `simpo`."""
    sft_weight: float = key(0.0, at_least=0)
    """Weight of the chosen answer's mean negative log-likelihood in the loss of `dpo`, `ipo` and `simpo`."""
    desirable_weight: float = key(1.0, at_least=0)
    """Weight of desirable answers in `kto`."""
    undesirable_weight: float = key(1.0, at_least=0)
    """Weight of undesirable answers in `kto`."""

    center_rewards: float = key(0.0, at_least=0)
    """Weight of the squared sum of a pair's rewards in the loss of `reward`, which keeps rewards around 0."""

    def faults(self, task: str, traits: TaskTraits) -> Iterator[Fault]:
        """Yield invalid values, and keys that the task `train.task` does not use."""
        yield from value_faults(self, "preference")
        for name in changed_fields(self):
            if name not in traits.keys:
                text = f"is {getattr(self, name)}, but train.task={task} does not use it. Remove it"
                yield Fault(f"preference.{name}", text)
