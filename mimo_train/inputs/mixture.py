"""The weights of a run's sources over its samples, from the config and from the checkpoint it resumes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.order.mixture import Phase, whole_weights
from data.text_format import plural
from mimo_train.config.errors import Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.layout.batch import Batch

KEY = "mixture"
"""Key in a checkpoint's record: the weights by first sample, past and planned."""


@dataclass
class Mixing:
    """The weights by first sample."""

    cfg: ConfigContainer
    batch: Batch
    sizes: Sequence[int]
    """Samples of each source."""
    phases: list[Phase] = field(init=False)
    """(first sample, reduced weights)."""

    def __post_init__(self) -> None:
        self.phases = self._from(0, 0, [(0, self.weights(0))])

    def weights(self, step: int) -> tuple[int, ...]:
        """Return the reduced weights of the config after `step` steps."""
        data = self.cfg.data
        if not data.mix:
            return (1,)
        weights = {
            name: size if source.weight is None else source.weight
            for name, source, size in zip(source_names(data.mix), data.mix, self.sizes, strict=True)
        }
        for change in data.mix_schedule:
            weights |= change.weights if change.after_step <= step else {}
        return whole_weights(list(weights.values()))

    def record(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's record; empty without a mixture."""
        if not self.cfg.data.mix:
            return {}
        return {KEY: [[start, list(weights)] for start, weights in self.phases]}

    def continue_from(self, record: Mapping[str, Any]) -> None:
        """Resume from a checkpoint's record. Changed weights take effect at the next sample."""
        if not self.cfg.data.mix:
            return
        step, consumed = record["step"], record["train_state"]["consumed_train_samples"]
        past, now = self._before(record), self.weights(step)
        if past[-1][1] != now:
            past = [*(phase for phase in past if phase[0] < consumed), (consumed, now)]
        self.phases = self._from(step, consumed, past)

    def _before(self, record: Mapping[str, Any]) -> list[Phase]:
        """Return the phases that had begun at a checkpoint."""
        consumed = record["train_state"]["consumed_train_samples"]
        saved = record.get(KEY) or [[0, self.weights(0)]]
        return [(start, tuple(weights)) for start, weights in saved if start <= consumed]

    def _from(self, step: int, consumed: int, past: list[Phase]) -> list[Phase]:
        """Return `past` and the later changes of the config."""
        phases = past
        for change in self.cfg.data.mix_schedule:
            if change.after_step > step and (weights := self.weights(change.after_step)) != phases[-1][1]:
                start = consumed + self.batch.samples_of(change.after_step - step, consumed)
                phases = [*phases, (start, weights)]
        return phases


def too_short(cfg: ConfigContainer, batch: Batch, samples: int, source: str = "") -> Fault:
    """Return the fault of a run whose source, with `samples` samples, ends before the first step."""
    of = f" of {source}" if source else ""
    weights = ", give it less weight in data.mix" if source else ""
    return Fault(
        "data.exhausted",
        f"is stop, and the {samples:,} samples{of} do not last for the first step of "
        f"{plural(batch.size_at(0), 'sample')}: give "
        f"more samples or a smaller train.global_batch_size{weights}, or set data.exhausted=repeat",
    )
