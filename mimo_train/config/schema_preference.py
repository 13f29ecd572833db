"""Keys of the tasks that compare answers: `preference`."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, value_faults
from mimo_train.config.tasks import TaskTraits


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
