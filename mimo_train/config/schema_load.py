"""Config of the weights of a module that a new run takes from another run. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mimo_train.config.fault import Fault
from mimo_train.config.keys import Section, value_faults
from mimo_train.config.parts import LANGUAGE, PARTS, parts_of
from mimo_train.config.places import place_faults


@dataclass
class LoadConfig(Section):
    """Weights that a module of a new run begins with, from a checkpoint of any run and layout."""

    path: str = ""
    """Folder or URL of a run, whose newest checkpoint it is, or of a checkpoint. Required."""
    module: str = ""
    """Name of the module there; empty: as here."""
    only: list[str] = field(default_factory=list)
    """Parameters that are taken: `encoder`, `projector`, `llm`, or shell patterns of names as in `freeze`; empty: all.
    A pattern that matches nothing there is an error."""
    strict: bool = True
    """Whether it is an error if a parameter here is not there (adapters of this run aside), one there has no place
    here, or the model there is another one. Otherwise these are listed, and what is new keeps its initial values. A
    parameter of another shape is always an error."""

    def faults(self, prefix: str, name: str, modules: list[str]) -> Iterator[Fault]:
        """What is wrong with the values.

        Args:
            name: of the module that it is for.
            modules: names of the run's modules.
        """
        if name not in modules:
            yield Fault(prefix, f"no module has this name: the modules are {', '.join(modules)}")
            return
        yield from value_faults(self, prefix)
        if not self.path:
            yield Fault(f"{prefix}.path", "is empty: give the folder of a run or of a checkpoint")
        yield from place_faults(f"{prefix}.path", self.path)
        if (name == LANGUAGE) != (self.source(name) == LANGUAGE):
            yield Fault(f"{prefix}.module", f"is {self.source(name)!r}: a language model is no encoder")
        parts = parts_of(name)
        for entry in self.only:
            if entry in PARTS and entry not in parts:
                yield Fault(f"{prefix}.only", f"{entry!r} is no part of this module, it has {' and '.join(parts)}")

    def source(self, name: str) -> str:
        """The name of the module there, for the module `name` here."""
        return self.module or name
