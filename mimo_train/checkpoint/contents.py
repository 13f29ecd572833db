"""What a checkpoint holds beside the model and its optimizer, as whoever owns it hands it over: states of the loop, and
fingerprints of what the run reads."""

from dataclasses import dataclass
from typing import Any, Protocol

from data.pipeline import Samples


class Stateful(Protocol):
    """Plain numbers that a checkpoint holds."""

    step: int

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class Sums(Protocol):
    """What the log has summed since its last line, for example `mimo_train.training.log.StepLog`."""

    def state_dict(self) -> dict[str, Any] | None:
        """On the rank that writes the log; None on others."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Repeatable(Protocol):
    """State of a step that may have to be repeated, for example `mimo_train.debug.rerun.Rerun`."""

    def state_dict(self, data: Any) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Fingerprints:
    """What a run reads, as far as a checkpoint depends on it."""

    data: str
    """Of the training shards; a checkpoint of others is refused."""
    text: str
    """Of tokenizer, chat template and placeholders, likewise."""
    vocabulary: str
    """Of the tokenizer's vocabulary; weights that were trained with another one are refused."""

    data_size: tuple[int, int] | None = None
    """(shards, samples) of the training data, so that it can be said how others differ."""

    @classmethod
    def of(cls, dataset: Samples, vocabulary: str) -> "Fingerprints":
        """Those of a run's training samples."""
        size = (len(dataset.shards), sum(dataset.source_sizes))
        return cls(dataset.fingerprint, dataset.text_fingerprint, vocabulary, size)

    def record(self) -> dict[str, Any]:
        """As a checkpoint's record has them."""
        names = {"data": self.data, "text": self.text, "vocabulary": self.vocabulary}
        return {f"{name}_fingerprint": value for name, value in names.items()} | {"data_size": self.data_size}
