"""Keys of the launcher: `launch`. Imports no torch."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.fault import Fault
from mimo_train.config.keys import Section, key, value_faults


@dataclass
class LaunchConfig(Section):
    """What the launcher decides when it knows its nodes."""

    layouts: dict[int, str] = key(factory=dict)
    """Changes to the config by the number of nodes: `{8: '', 7: modules.language.layout.dp=7}`. A word without = is a
    file of the group `layout`. Those of the command line come after them; another number of nodes is an error. Empty:
    the layout of the config, on any number of nodes. See docs/launch.md#fewer-nodes."""

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be. `mimo-train check` looks at the layouts themselves."""
        yield from value_faults(self, "launch")
        for nodes, text in self.layouts.items():
            if nodes < 1:
                yield Fault(f"launch.layouts.{nodes}", "the number of nodes must be at least 1")
            try:
                words = shlex.split(text)
            except ValueError as error:
                yield Fault(f"launch.layouts.{nodes}", f"is {text!r}: {error}")
                continue
            for word in words:
                if word.partition("=")[0].startswith("launch."):
                    yield Fault(f"launch.layouts.{nodes}", f"changes {word.partition('=')[0]}, which has been read")

    def overrides(self, nodes: int) -> list[str]:
        """The changes for a number of nodes, of a section without faults; none where `layouts` is empty.

        Raises:
            KeyError: `layouts` has others only.
        """
        if not self.layouts:
            return []
        words = shlex.split(self.layouts[nodes])
        return [word if "=" in word or word.startswith("~") else f"layout={word}" for word in words]
