"""Utilisation of the devices against their peaks, and the imbalance of work between data-parallel ranks."""

from collections.abc import Callable, Mapping, Sequence

from data.order.step import StepBatch
from data.order.step_plan import Span
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
"""Dense peaks of one device in TFLOP/s, by what its name contains; the longest of several such names counts: in bf16
and fp16; in fp32, whose products torch does not round to TF32 unless it is told to; in fp8, None where there is none.

From NVIDIA's data sheets; where they quote 2:4 sparsity, half of it. H100 and H800 alone are the SXM boards."""


def peak_tflops(device_name: str, precision: str = "bf16") -> float | None:
    """Dense peak of a device in TFLOP/s by the name that CUDA gives it; None if it is not known, or if the device is a
    part of one (MIG).

    Args:
        precision: of the products: that of `train.precision` (bf16, fp16 or fp32), or fp8.
    """
    words = device_name.replace("-", " ").split()
    known = [name for name in PEAK_TFLOPS if _contains(words, name.split())]
    if not known or "MIG" in words:
        return None
    half, single, eighth = PEAK_TFLOPS[max(known, key=len)]
    return {"fp32": single, "fp8": eighth}.get(precision, half)


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words)))


def utilisation(
    flops: Mapping[str, Flops], seconds: float, layout: RunLayout, peaks: Mapping[str, float | None] | None = None
) -> dict[str, float]:
    """What the devices of each module, and of the whole run, get done.

    MFU, the model FLOPs utilisation, is model FLOPs / (seconds x devices x peak); HFU has hardware FLOPs instead
    (Chowdhery et al. 2022, arXiv:2204.02311, section 4.1). Of a run whose modules have different peaks it is the sum
    of each one's FLOPs over its peak / (seconds x devices): the share of the time that it would take at them. A
    module's devices are all that it holds, those of the run are all that are allocated, idle ones included.

    Args:
        flops: FLOPs of each module in a step.
        seconds: seconds of the step.
        peaks: of one device for the products of each module, in TFLOP/s; without it, or with one that is None, MFU and
            HFU of this module and of the run are left out.

    Returns:
        `tflops/<module>` (TFLOP/s of one device, model FLOPs), `mfu/<module>`, `hfu/<module>`, and the same of the run:
        `tflops`, `mfu`, `hfu`.
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
    spans: Callable[[ModuleLayout, int], Sequence[Span]],
) -> dict[str, float]:
    """Work of the busiest data-parallel rank over the mean, of every module that has several and anything to do.

    Args:
        work_of_texts: FLOPs of the language model over texts by their lengths (`StepPlan.texts_of_length`).
        spans: samples of a microbatch that each data-parallel rank of an encoder computes (`StepShapes.spans`). Its
            work are tokens inside the encoder.

    Returns:
        {"imbalance/NAME": 1.0 where all have as much}; of the language model's two kinds of work also
        "imbalance_tokens/language", and "imbalance_attention/language" of the squares of the lengths of texts.
    """
    found = {}
    for name, module in layout.modules.items():
        if module.dp == 1:
            continue
        if name == LANGUAGE:
            of_ranks = batch.plan.texts_of_ranks()
            work = [work_of_texts(texts) for texts in of_ranks]
            for what, power in (("tokens", 1), ("attention", 2)):
                loads = [sum(length**power * number for length, number in texts.items()) for texts in of_ranks]
                found[f"imbalance_{what}/{name}"] = _busiest(loads)
        else:
            work = [0.0] * module.dp
            for microbatch, of_samples in enumerate(batch.loads[name]):
                for rank, (first, last) in enumerate(spans(module, microbatch)):
                    work[rank] += sum(of_samples[first:last])
        if any(work):
            found[f"imbalance/{name}"] = _busiest(work)
    return found


def _busiest(work: Sequence[float]) -> float:
    """Return the most over the mean."""
    return max(work) * len(work) / sum(work)
