"""What a GPU computes, holds and sends, by the vendors' data sheets, and what a run gets of it. Imports no torch."""

from dataclasses import dataclass

PRODUCTS, ATTENTION = 0.6, 0.45
"""Share of the peak rate that products of matrices and core attention reach: assumed, not measured. Large dense models
train at 0.4 to 0.55 of the peak altogether (Narayanan et al. 2021, arXiv 2104.04473, table 1); `--profile` measures."""
TRAFFIC, LINKS = 0.7, 0.75
"""Share of the peak rate of the device's memory and of links: assumed."""
TOUCHED = 2.0
"""Bytes that go between memory and processor in a forward pass, for each byte of activations that is kept."""
LEAST_LAYER = 1e-4
"""Seconds that the host takes at least to start the kernels of a layer's forward pass: assumed."""
LATENCY_INSIDE, LATENCY_ACROSS = 8e-6, 2e-5
"""Seconds of a message inside of a node and between nodes: assumed."""

MARGIN = 0.15
"""Share of a GPU's memory that is left for what is not estimated: CUDA's context, buffers of NCCL, workspaces of
kernels, fragments."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one process of a CPU."""

    name: str
    memory: float
    """Bytes."""
    half: float
    """Floating point operations in a second, of products in bf16 or fp16 without sparsity."""
    single: float
    """Those in fp32, without TF32."""
    traffic: float
    """Bytes in a second to and from its memory."""
    inside: float
    """Bytes in a second and direction to other GPUs of the node."""
    across: float
    """Those to other nodes, for each GPU."""
    cores: float = 0.0
    """Ranks of a node that compute at once; more share them. 0: each has its own."""
    latency: float = LATENCY_INSIDE
    """Seconds of a message inside of a node."""
    process: float = 0.0
    """Seconds of a step that a rank takes beside its layers, messages and update: the program around them."""
    eighth: float = 0.0
    """Floating point operations in a second, of products in fp8 without sparsity; 0: it has none."""

    def rate(self, precision: str) -> float:
        """Floating point operations in a second, by `train.precision`."""
        return self.single if precision == "fp32" else self.half


_TERA, _GIGA = 1e12, 1e9


def _device(
    name: str, memory: float, eighth: float, half: float, single: float, traffic: float, inside: float, across: float
) -> Device:
    """From GB, three times TFLOP/s, three times GB/s."""
    rates = half * _TERA, single * _TERA, traffic * _GIGA, inside * _GIGA, across * _GIGA
    return Device(name, memory * _GIGA, *rates, eighth=eighth * _TERA)


DEVICES = {
    device.name: device
    for device in (
        _device("a100-40", 40, 0, 312, 19.5, 1555, 300, 25),
        _device("a100", 80, 0, 312, 19.5, 2039, 300, 25),
        _device("h100", 80, 1979, 989, 67, 3350, 450, 50),
        _device("h200", 141, 1979, 989, 67, 4800, 450, 50),
        _device("b200", 180, 4500, 2250, 75, 7700, 900, 50),
        _device("l40s", 48, 733, 362, 91.6, 864, 25, 12.5),
    )
}
"""SXM modules, but for l40s (PCIe). Between nodes as their usual servers have it: a network card of 400 Gbit/s for each
GPU, 200 of an a100, 100 of an l40s; `--network` for others."""


CORE, CORE_TRAFFIC = 120e9, 20e9
"""Floating point operations in a second of a core of a CPU, of which `PRODUCTS` are reached, and bytes in a second to
and from its memory: assumed, so that steps of the demo come out as in benchmarks/planner_demo_cpu2_2026-11-23.md."""
MESSAGE, MESSAGES, PROCESS, TOGETHER = 1.3e-4, 1.3e9, 0.017, 0.9
"""Seconds of a message between processes of a CPU over gloo, bytes in a second, seconds of a step that a process takes
beside layers, and what of a core each has where several compute at once: as measured there."""


def processor(memory: float, cores: int) -> Device:
    """A process of one thread on this machine's CPU, with the rates of any.

    Args:
        memory: bytes that each process can have.
        cores: that the processes of a node share.
    """
    links, name = MESSAGES / LINKS, f"processes of this CPU with {cores} core{'s' * (cores != 1)}"
    at_once = TOGETHER * cores if cores > 1 else 1.0
    return Device(name, memory, CORE, CORE, CORE_TRAFFIC, links, links, at_once, MESSAGE, PROCESS)


@dataclass(frozen=True)
class Links:
    """Seconds of messages between the ranks of a run."""

    device: Device
    node: int
    """GPUs of a node."""

    def between(self, ranks: int) -> bool:
        """Whether so many neighbouring ranks have more than a node."""
        return ranks > self.node

    def send(self, nbytes: float, across: bool) -> float:
        """A message from one rank to another."""
        return self._latency(across) + nbytes / self._rate(across)

    def gather(self, nbytes: float, ranks: int, span: int, lanes: int = 1) -> float:
        """An all-gather, or a reduce-scatter, of `nbytes` in all: (n - 1) / n of them pass each rank in n - 1 messages
        around a ring (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").

        Args:
            ranks: n.
            span: neighbouring ranks among which they are.
            lanes: of them on a node, which send to other nodes side by side.
        """
        if ranks == 1:
            return 0.0
        across = self.between(span)
        rate = min(self._rate(across) * lanes, self._rate(False)) if across else self._rate(False)
        return (ranks - 1) * self._latency(across) + (ranks - 1) / ranks * nbytes / rate

    def _latency(self, across: bool) -> float:
        return LATENCY_ACROSS if across else self.device.latency

    def _rate(self, across: bool) -> float:
        return (self.device.across if across else self.device.inside) * LINKS
