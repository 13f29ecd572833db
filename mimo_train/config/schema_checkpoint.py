"""Config of checkpoints: when and where they are written, and the weights that a run starts from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.parts import LANGUAGE, PARTS, parts_of
from mimo_train.config.paths import place_faults
from mimo_train.config.schema_selection import KeepBestConfig


@dataclass
class LoadConfig(Section):
    """Weights that a module of a new run starts from, from a checkpoint of any run and layout."""

    path: str = ""
    """Path or URL of a checkpoint, or of a run (its newest checkpoint)."""
    module: str = ""
    """Name of the module there, if it is another."""
    only: list[str] = field(default_factory=list)
    """Parameters to load, as in `freeze`; empty: all."""
    strict: bool = True
    """Missing or unexpected parameters are errors. `false`: list them, and keep initial values."""

    def faults(self, prefix: str, name: str, modules: list[str]) -> Iterator[Fault]:
        """Yield faults of the values; `name`: of the module to load; `modules`: names of the run's modules."""
        if name not in modules:
            yield Fault(prefix, f"no module has this name: the modules are {', '.join(modules)}")
            return
        yield from value_faults(self, prefix)
        if not self.path:
            yield Fault(f"{prefix}.path", "is empty. Set it to the folder of a run or of a checkpoint")
        yield from place_faults(f"{prefix}.path", self.path)
        if (name == LANGUAGE) != (self.source(name) == LANGUAGE):
            yield Fault(f"{prefix}.module", f"is {self.source(name)!r}: a language model is no encoder")
        parts = parts_of(name)
        for entry in self.only:
            if entry in PARTS and entry not in parts:
                yield Fault(f"{prefix}.only", f"{entry!r} is no part of this module, it has {' and '.join(parts)}")

    def source(self, name: str) -> str:
        """Return the name of the module in the checkpoint, for module `name` here."""
        return self.module or name


@dataclass
class CheckpointConfig(Section):
    """Saving and resuming of a run."""

    dir: str = ""
    """URL for checkpoints, such as `s3://bucket/my_run`. Empty: in `run.dir`. See
    docs/checkpoints.md#object-storage."""
    save_interval: int = key(0, at_least=0)
    """Steps between checkpoints; 0: at the end only."""
    resume: str = key("auto", filled="auto, never or a folder")
    """`auto` (this run's newest checkpoint), `never`, or a checkpoint or run by path or URL."""
    weights: str = ""
    """Run or checkpoint whose weights, and nothing else, a new run starts from."""
    load_modules: dict[str, LoadConfig] = field(default_factory=dict)
    """Modules whose weights a new run takes from other runs. See docs/checkpoints.md#modules-from-other-runs."""
    trained_only: bool = False
    """Leave weights that are never trained out of checkpoints. See docs/frozen.md#small-checkpoints."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Train on while a checkpoint is written: `true`, `false`, or `auto` (if host memory allows). See
    docs/checkpoints.md#saving-while-training."""
    keep: int = key(3, at_least=0)
    """Newest checkpoints to keep; 0: all."""
    keep_every: int = key(0, at_least=0)
    """Also keep checkpoints at multiples of this step."""
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    """Save and keep the best checkpoints by a metric. See docs/checkpoints.md#the-best-checkpoints."""
    non_persistent_interval: int = key(0, at_least=0)
    """Steps between extra checkpoints of which only the newest stays; 0: none."""

    def faults(self) -> Iterator[Fault]:
        """Yield invalid values; `ConfigContainer.faults` checks modules."""
        faults = [*value_faults(self, "checkpoint")]
        yield from faults
        if not faults:
            yield from place_faults("checkpoint.dir", self.dir, written=True)
            yield from place_faults("checkpoint.resume", self.resume)
            yield from place_faults("checkpoint.weights", self.weights)
