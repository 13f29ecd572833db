"""Utilisation of the devices against their peaks, and the imbalance of work between data-parallel ranks."""

from collections.abc import Callable, Mapping, Sequence

from data.order.load_balance import Routes
from data.order.step import StepBatch
from mimo_train.config.parts import LANGUAGE
from mimo_train.estimate.flops import Flops
from mimo_train.layout.ranks import ModuleLayout, RunLayout

PEAK_TFLOPS: dict[str, tuple[float, float, float | None]] = {
    "A100": (312.0, 19.5, None),
    "A800": (312.0, 19.5, None),
    "B200": (2250.0, 75.0, 4500.0),
    "GB200": (2500.0, 80.0, 5000.0),
    "H100": (989.0, 67.0, 1979.0),
    "H100 NVL": (835.0, 60.0, 1671.0),
    "H100 PCIe": (756.0, 51.0, 1513.0),
    "H200": (989.0, 67.0, 1979.0),
    "H800": (989.0, 67.0, 1979.0),
    "L40S": (362.0, 91.6, 733.0),
}
"""Dense peak TFLOP/s of one device in (bf16 and fp16, fp32, fp8), None if unsupported. Keys are parts of device names;
the longest match counts. fp32 is without TF32, torch's default.

From NVIDIA's data sheets, halved where they quote 2:4 sparsity. Plain H100 and H800 are the SXM boards.
"""


def peak_tflops(device_name: str, precision: str = "bf16") -> float | None:
    """Return the dense peak of a device in TFLOP/s by its CUDA name; None if unknown or a part of a device (MIG).

    Args:
        precision: of the matmuls: that of `train.precision` (bf16, fp16 or fp32), or fp8.
    """
    words = device_name.replace("-", " ").split()
    devices = [name for name in PEAK_TFLOPS if _contains(words, name.split())]
    if not devices or "MIG" in words:
        return None
    half, single, eighth = PEAK_TFLOPS[max(devices, key=len)]
    return {"fp32": single, "fp8": eighth}.get(precision, half)


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words)))


def utilisation(
    flops: Mapping[str, Flops], seconds: float, layout: RunLayout, peaks: Mapping[str, float | None] | None = None
) -> dict[str, float]:
    """Return the utilisation of each module's devices, and of the whole run's.

    MFU, the model FLOPs utilisation, is model FLOPs / (seconds x devices x peak); HFU uses hardware FLOPs (Chowdhery et
    al. 2022, arXiv:2204.02311, section 4.1). With different peaks per module, the run's value is the sum of each
    module's FLOPs / peak, over (seconds x devices). A module's devices are all that it holds; the run's are all
    allocated ones, including idle ones.

    Args:
        flops: FLOPs of each module in a step.
        seconds: seconds of the step.
        peaks: peak of one device for the matmuls of each module, in TFLOP/s; without it, or if it is None, MFU and HFU
            of the module and of the run are left out.

    Returns:
        `tflops/<module>` (model TFLOP/s per device), `mfu/<module>`, `hfu/<module>`, and for the run `tflops`, `mfu`,
        `hfu`.
    """
    values, shares = {}, Flops()
    for name in layout.modules:
        done, peak = flops[name] * (1e-12 / seconds), (peaks or {}).get(name)
        values[f"tflops/{name}"] = done.model / layout.modules[name].size
        if peak:
            shares += (share := done * (1 / peak))
            values[f"mfu/{name}"] = share.model / layout.modules[name].size
            values[f"hfu/{name}"] = share.hardware / layout.modules[name].size
    values["tflops"] = sum(flops.values(), Flops()).model * 1e-12 / (seconds * layout.world_size)
    if peaks and all(peaks.get(name) for name in layout.modules):
        values["mfu"], values["hfu"] = shares.model / layout.world_size, shares.hardware / layout.world_size
    return values


def imbalance(
    batch: StepBatch,
    layout: RunLayout,
    work_of_texts: Callable[[Mapping[int, int]], float],
    routes: Callable[[ModuleLayout, int], Routes],
) -> dict[str, float]:
    """Return the busiest data-parallel rank's work over the mean, for every module with several ranks and any work.

    Args:
        work_of_texts: FLOPs of the language model for texts by length (`StepPlan.texts_of_length`).
        routes: media items of a microbatch and their ranks in an encoder (`StepShapes.routes`).

    Returns:
        {"imbalance/NAME": 1.0 if balanced}; for the language model also "imbalance_tokens/language", and
        "imbalance_attention/language" from squared text lengths.
    """
    values = {}
    for name, module in layout.modules.items():
        if module.dp == 1:
            continue
        if name == LANGUAGE:
            of_ranks = batch.plan.texts_of_ranks()
            work = [work_of_texts(texts) for texts in of_ranks]
            for what, power in (("tokens", 1), ("attention", 2)):
                loads = [sum(length**power * number for length, number in texts.items()) for texts in of_ranks]
                values[f"imbalance_{what}/{name}"] = _busiest(loads)
        else:
            of_passes = [routes(module, microbatch).work(module.dp) for microbatch in range(len(batch.plan.shares))]
            work = [float(sum(of_rank)) for of_rank in zip(*of_passes, strict=True)]
        if any(work):
            values[f"imbalance/{name}"] = _busiest(work)
    return values


def _busiest(work: Sequence[float]) -> float:
    return max(work) * len(work) / sum(work)
