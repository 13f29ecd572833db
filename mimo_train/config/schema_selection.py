"""Keys that watch a metric of evaluations: `checkpoint.keep_best` and `train.stop_early`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults


@dataclass
class WatchConfig(Section):
    """A metric of evaluations, and which of its values are better."""

    metric: str = ""
    """Key in metrics.jsonl, such as `eval/loss` or `eval/charts/exact_match`; empty: off."""
    mode: str = key("", choices=("", "min", "max"))
    """Better values are smaller (`min`) or larger (`max`). Required with a metric."""

    def faults(self, prefix: str, evaluates_at: Mapping[str, int], eval_interval: int) -> Iterator[Fault]:
        """Yield invalid values.

        Args:
            prefix: config key of the section.
            evaluates_at: `DataConfig.evaluates_at`.
            eval_interval: `train.eval_interval`.
        """
        wrong = [*value_faults(self, prefix)]
        yield from wrong
        if wrong or not self.metric:
            return
        if not self.mode:
            yield Fault(f"{prefix}.mode", f"is empty. Set min if smaller values of {self.metric} are better, else max")
        at = set_of(self.metric, evaluates_at)
        if at is None:
            sets = ", ".join(f"{name}..." for name in evaluates_at) or "none: set data.validation_shards"
            yield Fault(
                f"{prefix}.metric",
                f"{self.metric} is of no set that is evaluated during training ({sets})",
            )
        elif self.needs_interval and not (evaluates_at[at] or eval_interval):
            yield Fault(
                f"{prefix}.metric",
                f"{self.metric} is only evaluated after the last step. Set train.eval_interval",
            )

    @property
    def needs_interval(self) -> bool:
        """True if one evaluation after the last step is not enough."""
        return False

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """True if `value` is better than `other` by more than `by`."""
        return value < other - by if self.mode == "min" else value > other + by


@dataclass
class KeepBestConfig(WatchConfig):
    """The best checkpoints, which are kept in addition to `checkpoint.keep`."""

    count: int = key(1, at_least=1)
    """Number of best checkpoints to keep."""


@dataclass
class StopEarlyConfig(WatchConfig):
    """The end of a run whose metric no longer improves."""

    patience: int = key(3, at_least=1)
    """End the run after this many evaluations in a row without an improvement."""
    min_delta: float = key(0.0, at_least=0)
    """Smaller improvements do not count."""

    @property
    def needs_interval(self) -> bool:
        return True


def set_of(metric: str, prefixes: Mapping[str, int]) -> str | None:
    """Return the prefix of the set that a metric is of, the longest that fits; None if there is none."""
    fitting = [prefix for prefix in prefixes if metric.startswith(prefix) and metric != prefix]
    return max(fitting, key=len, default=None)
