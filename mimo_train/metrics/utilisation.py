"""Arithmetic of throughput: peaks of devices, utilisation. Imports no torch."""

from collections.abc import Mapping

from mimo_train.plan.flops import Flops
from mimo_train.plan.layout import RunLayout

PEAK_TFLOPS = {
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "B200": (2250.0, 75.0),
    "GB200": (2500.0, 80.0),
    "H100": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H200": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "L40S": (362.0, 91.6),
}
"""Dense peaks of one device in TFLOP/s, by what its name contains; the longest of several such names counts: in bf16
and fp16, and in fp32, whose products torch does not round to TF32 unless it is told to.

From NVIDIA's data sheets; where they quote 2:4 sparsity, half of it. H100 and H800 alone are the SXM boards."""


def peak_tflops(device_name: str, precision: str = "bf16") -> float | None:
    """Dense peak of a device in TFLOP/s by the name that CUDA gives it; None if it is not known, or if the device is a
    part of one (MIG).

    Args:
        precision: of the products, as `train.precision`: bf16, fp16 or fp32.
    """
    words = device_name.replace("-", " ").split()
    known = [name for name in PEAK_TFLOPS if _contains(words, name.split())]
    return PEAK_TFLOPS[max(known, key=len)][precision == "fp32"] if known and "MIG" not in words else None


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words)))


def utilisation(
    flops: Mapping[str, Flops], seconds: float, layout: RunLayout, peak: float | None = None
) -> dict[str, float]:
    """What the devices of each module, and of the whole run, get done.

    MFU, the model FLOPs utilisation, is model FLOPs / (seconds x devices x peak); HFU has hardware FLOPs instead
    (Chowdhery et al. 2022, arXiv:2204.02311, section 4.1). A module's devices are all that it holds, those of the run
    are all that are allocated, idle ones included.

    Args:
        flops: FLOPs of each module in a step.
        seconds: seconds of the step.
        peak: of one device, in TFLOP/s; None: MFU and HFU are left out.

    Returns:
        `tflops/<module>` (TFLOP/s of one device, model FLOPs), `mfu/<module>`, `hfu/<module>`, and the same of the run:
        `tflops`, `mfu`, `hfu`.
    """
    values = {}
    parts = [(f"/{name}", flops[name], layout.modules[name].size) for name in layout.modules]
    for suffix, done, devices in [*parts, ("", sum(flops.values(), Flops()), layout.world_size)]:
        per_device = done * (1e-12 / (seconds * devices))
        values[f"tflops{suffix}"] = per_device.model
        if peak:
            values[f"mfu{suffix}"] = per_device.model / peak
            values[f"hfu{suffix}"] = per_device.hardware / peak
    return values
