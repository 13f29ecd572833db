"""Keys of a run's folder, device, placement and launch."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, is_installed, key, value_faults
from mimo_train.config.paths import local_faults
from mimo_train.config.schema_modules import MOST_RANKS

LEAST_PATIENCE = 0.25
"""Lower bound of `run.timeout_minutes` with in-process restarts, whose barriers wait twice as long."""

YEAR = 365 * 24 * 60
"""Minutes of a year. Far larger timeouts overflow the units of libraries."""


@dataclass
class RunConfig(Section):
    """The folder and the device of a run."""

    dir: str = key("runs/run", filled="the folder that the run writes into")
    """Folder that the run writes into. The same folder again resumes the run."""
    seed: int = key(1234, at_least=0, at_most=2**63 - 1)
    """Seed of initial weights, sample order and dropout."""
    device: str = key("auto", choices=("auto", "cuda", "cpu"))
    """`cuda`, `cpu`, or `auto`: CUDA if each process of a machine has a device."""
    cpu_kernels: bool = key(True)
    """Use the CPU fast paths of `mimo_train/cpu/`. `false`: compute as on GPUs."""
    timeout_minutes: float = key(10.0, at_least=0.001, below=YEAR)
    """Minutes that a rank waits for its peers in a collective."""
    hang_report_seconds: float = key(300.0, at_least=0, below=60 * YEAR, zero_means="never")
    """Seconds without progress until the run names the rank to blame and exits with code 18. See
    docs/reliability.md#hangs."""
    inprocess_restarts: int = key(0, at_least=0, at_most=1_000_000)
    """Restarts of a failed run inside its processes. See docs/reliability.md#in-process-restart."""

    def faults(self, resume: str) -> Iterator[Fault]:
        """Yield invalid values, alone and together with `checkpoint.resume`."""
        yield from value_faults(self, "run")
        yield from local_faults("run.dir", self.dir, "give the URL as checkpoint.dir")
        if self.inprocess_restarts > 0 and not is_installed("nvidia_resiliency_ext.inprocess"):
            text = "nvidia_resiliency_ext is not installed. Run `pip install 'mimo-train[resiliency]'`, or set it to 0"
            yield Fault("run.inprocess_restarts", text)
        if self.inprocess_restarts > 0 and 0 < self.timeout_minutes <= LEAST_PATIENCE:
            yield Fault(
                "run.timeout_minutes",
                f"must be above {LEAST_PATIENCE} with run.inprocess_restarts {self.inprocess_restarts}, is "
                f"{self.timeout_minutes}: ranks send a sign of life every second, and are missed after 30",
            )
        if self.inprocess_restarts > 0 and resume != "auto":
            yield Fault(
                "checkpoint.resume",
                f"must be auto with run.inprocess_restarts {self.inprocess_restarts}, is {resume!r}: a run that starts "
                "again continues from its newest checkpoint",
            )


@dataclass
class PlacementConfig(Section):
    """The ranks of the modules."""

    mode: str = key("disjoint", choices=("disjoint", "shared"))
    """`disjoint`: one module after the other. `shared`: encoders on the ranks of the language model's first stage."""
    first_rank: dict[str, int] = key(factory=dict, at_most=MOST_RANKS)
    """First rank of every module: `'placement.first_rank={images: 1, language: 0}'`."""
    allow_idle: bool = False
    """Allow processes without a module. They exit at once."""
    ranks_per_node: int = key(0, at_least=0, at_most=MOST_RANKS)
    """Ranks of a node, for `mimo-train check`; 0: as launched."""
    tp_across_nodes: bool = False
    """Allow tensor-parallel groups across nodes."""

    def faults(self) -> Iterator[Fault]:
        """Yield invalid values; `mimo_train.layout.placement` checks ranks and modules together."""
        yield from value_faults(self, "placement")
        for name, rank in self.first_rank.items():
            if rank < 0:
                yield Fault(f"placement.first_rank.{name}", f"must be at least 0, is {rank}")
        if self.first_rank and self.mode == "shared":
            yield Fault(
                "placement.first_rank",
                "requires placement.mode=disjoint: shared modules all start at rank 0. Remove it",
            )


@dataclass
class LaunchConfig(Section):
    """Layouts by the number of nodes."""

    layouts: dict[int, str] = key(factory=dict)
    """Config changes by the number of nodes: `{8: '', 7: modules.language.layout.dp=7}`. See
    docs/launch.md#fewer-nodes."""

    def faults(self) -> Iterator[Fault]:
        """Yield invalid values; `mimo-train check` checks the layouts themselves."""
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
        """Return the overrides for a number of nodes, of a section without faults; none if `layouts` is empty. Raises
        KeyError for other numbers."""
        if not self.layouts:
            return []
        words = shlex.split(self.layouts[nodes])
        return [word if "=" in word or word.startswith("~") else f"layout={word}" for word in words]
