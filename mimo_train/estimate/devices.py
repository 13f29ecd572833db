"""Rates, memory and links of GPUs from data sheets, and the share of them that a run reaches."""

from dataclasses import dataclass

MATMULS, ATTENTION = 0.6, 0.45
"""Share of the peak rate that matmuls and core attention reach: assumed, not measured. Large dense models train at 0.4
to 0.55 of the peak overall (Narayanan et al. 2021, arXiv 2104.04473, table 1)."""
TRAFFIC, LINKS = 0.7, 0.75
"""Share of the peak rate of device memory and of links: assumed."""
TOUCHED = 2.0
"""Bytes of memory traffic in forward for each byte of kept activations."""
LEAST_LAYER = 1e-4
"""Minimum seconds of host time to launch the kernels of a layer's forward pass: assumed."""
LATENCY_INSIDE, LATENCY_ACROSS = 8e-6, 2e-5
"""Latency of a message inside a node and between nodes, in seconds: assumed."""

MARGIN = 0.15
"""Share of a GPU's memory kept free for the CUDA context, NCCL buffers, workspaces and fragmentation."""


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    memory: float
    """Bytes."""
    half: float
    """FLOP/s of matmuls in bf16 or fp16 without sparsity."""
    single: float
    """FLOP/s in fp32, without TF32."""
    traffic: float
    """Memory bandwidth in bytes/s."""
    inside: float
    """Bandwidth to other GPUs of the node, in bytes/s per direction."""
    across: float
    """Bandwidth to other nodes for each GPU, in bytes/s."""
    host: float
    """Bandwidth to the host's memory, in bytes/s per direction."""
    latency: float = LATENCY_INSIDE
    """Latency of a message inside a node, in seconds."""
    eighth: float = 0.0
    """FLOP/s of matmuls in fp8 without sparsity; 0: no fp8."""

    def rate(self, precision: str) -> float:
        """Return the FLOP/s in `train.precision`."""
        return self.single if precision == "fp32" else self.half


_TERA, _GIGA = 1e12, 1e9


def _device(
    name: str,
    memory: float,
    eighth: float,
    half: float,
    single: float,
    traffic: float,
    inside: float,
    across: float,
    host: float,
) -> Device:
    """Return a device from GB, TFLOP/s (three) and GB/s (four)."""
    rates = half * _TERA, single * _TERA, traffic * _GIGA, inside * _GIGA, across * _GIGA, host * _GIGA
    return Device(name, memory * _GIGA, *rates, eighth=eighth * _TERA)


DEVICES = {
    device.name: device
    for device in (
        _device("a100-40", 40, 0, 312, 19.5, 1555, 300, 25, 32),
        _device("a100", 80, 0, 312, 19.5, 2039, 300, 25, 32),
        _device("h100", 80, 1979, 989, 67, 3350, 450, 50, 64),
        _device("h200", 141, 1979, 989, 67, 4800, 450, 50, 64),
        _device("b200", 180, 4500, 2250, 75, 7700, 900, 50, 64),
        _device("l40s", 48, 733, 362, 91.6, 864, 25, 12.5, 32),
    )
}
"""SXM modules, except l40s (PCIe). Their usual servers have a 400 Gbit/s network card per GPU (a100 200, l40s 100);
`--network` sets another."""


@dataclass(frozen=True)
class Links:
    """Seconds of messages between the ranks of a run."""

    device: Device
    node: int
    """GPUs of a node."""

    def between(self, ranks: int) -> bool:
        """True if `ranks` neighbouring ranks do not fit on one node."""
        return ranks > self.node

    def send(self, nbytes: float, across: bool) -> float:
        """Return the seconds of a message from one rank to another."""
        return self._latency(across) + nbytes / self._rate(across)

    def gather(self, nbytes: float, ranks: int, span: int, lanes: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `nbytes` in total.

        In a ring, (n - 1) / n of them pass each rank in n - 1 messages (Thakur et al. 2005, "Optimization of Collective
        Communication Operations in MPICH").

        Args:
            ranks: n.
            span: neighbouring ranks that contain them.
            lanes: ranks of a node that send to other nodes at the same time.
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
