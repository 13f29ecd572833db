"""The sections: each runs jobs within its time limit and yields the rows of their results."""

import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.gpu import machine, runs
from benchmarks.gpu.jobs import Jobs, Outcome
from benchmarks.gpu.sizes import COMMON, Curve, Model, Shape, Sizes
from benchmarks.gpu.table import Row, row

CONFIG = "vlm_digits"
ROOM = 0.92
"""Share of the device's memory that an estimate may take."""
NO_ENGINE = "needs CUDA and Transformer Engine"
VARIANTS = {
    "encoder frozen": ("modules.images.freeze=[encoder]",),
    "LoRA of rank 16, encoder frozen": ("modules.images.freeze=[encoder]", "modules.language.lora.rank=16"),
}


class Sections:
    """All sections on one machine."""

    def __init__(self, jobs: Jobs, sizes: Sizes):
        self._jobs, self._sizes = jobs, sizes
        self._deadline = 0.0
        self._ceiling: float | None = None
        """TFLOP/s of a bf16 matmul, once it is measured."""
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        """Results of the section `steps`, by model and shape."""
        self._rows: dict[tuple[str, str, tuple[str, ...], bool], Row] = {}
        """Rows of steps that were measured, by model, shape, changes, and whether layers are Transformer Engine's."""

    @cached_property
    def machine(self) -> Outcome:
        """The machine and the software, see `machine.versions`."""
        return self._jobs.run(machine.versions, 180, device=self._sizes.device)

    def run(self, name: str) -> Iterator[Row]:
        """The rows of one section."""
        absent = self._absent(name)
        # A rehearsal measures nothing: it may take longer.
        self._deadline = time.monotonic() + SECTIONS[name].seconds if self._sizes.device == "cuda" else math.inf
        yield from [row(name, absent)] if absent else SECTIONS[name].rows(self)

    def device(self) -> Iterator[Row]:
        """Hardware and versions."""
        versions = self.machine.value
        yield Row("driver", versions["driver"] or "absent")
        for gpu in versions["gpus"]:
            capability = ".".join(map(str, gpu["capability"]))
            yield Row("device", f"{gpu['name']}, {gpu['memory']:.1f} GiB, compute capability {capability}")
        if not versions["gpus"]:
            yield Row("device", "no CUDA device", "skipped")
        yield Row("processor", f"{versions['cpu']}, {versions['memory']:.0f} GiB")
        yield Row("Python", versions["python"])
        libraries = [(name, versions[name.lower()]) for name in ("CUDA", "cuDNN", "NCCL")]
        yield Row("torch", ", ".join([versions["torch"], *(f"{name} {each}" for name, each in libraries if each)]))
        for package, version in versions["packages"].items():
            yield Row(package, version or "absent")

    def ceiling(self) -> Iterator[Row]:
        """Matmuls."""
        sizes = self._sizes
        shape = f"{sizes.matmul} x {sizes.matmul} x {sizes.matmul}"
        options = {"device": sizes.device, "size": sizes.matmul, "repeats": sizes.repeats}
        bf16 = self._job(machine.matmul, **options)
        if bf16.state == "ok":
            self._ceiling = bf16.value["median"]
        yield row(f"bf16 {shape}", bf16, lambda value: _matmul_text(value, value["peak"], "of {:g}"))
        absent = [gpu["capability"] for gpu in self.machine.value["gpus"][:1] if gpu["capability"] < (8, 9)]
        text = f"fp8 needs compute capability 8.9, the device has {absent}"
        fp8 = Outcome("skipped", text=text) if absent else self._job(machine.fp8_matmul, **options)
        yield row(f"fp8 {shape}", fp8, lambda value: _matmul_text(value, self._ceiling, "of bf16"))

    def losses(self) -> Iterator[Row]:
        """Curves against the CPU's."""
        sizes, folder = self._sizes, self._jobs.folder
        shards = self._job(runs.demos, folder=str(folder / "demo"), samples=sizes.samples)
        if shards.state != "ok":
            yield row("demo data", shards)
            return

        def train(curve: Curve, name: str, **options: Any) -> Outcome:
            return self._job(
                runs.curve,
                config=curve.config,
                shards=shards.value[curve.config],
                run_dir=str(folder / re.sub(r"\W+", "_", f"{curve.config} {name}")),
                overrides=[curve.layout, *sizes.curve_changes],
                **options,
            )

        references: dict[str, Outcome] = {}
        for curve in sizes.curves:
            what = f"{curve.config}, {curve.name}"
            if curve.te and not self._te:
                yield Row(what, NO_ENGINE, "skipped")
                continue
            if curve.config not in references:
                plain = {"precision": "fp32", "te": False, "compiled": False}
                references[curve.config] = train(curve, "reference", device="cpu", **plain)
            reference = references[curve.config]
            if reference.state != "ok":
                yield row(f"{curve.config} on the CPU", reference)
                continue
            options = {"precision": curve.precision, "te": curve.te, "compiled": curve.compiled}
            outcome = train(curve, curve.name, device=sizes.device, **options)
            yield _compared(what, reference.value, outcome, curve) if outcome.state == "ok" else row(what, outcome)

    def tests(self) -> Iterator[Row]:
        """tests/gpu."""
        outcome = self._job(machine.run_tests, tests=list(self._sizes.tests))
        yield row(
            " ".join(self._sizes.tests),
            outcome,
            lambda value: f"{value['passed']} passed, {len(value['failed'])} failed, {value['skipped']} skipped",
        )
        for name, message, details in (outcome.value or {}).get("failed", ()):
            yield Row(name, message, "failed", details)

    def steps(self) -> Iterator[Row]:
        """Models of three sizes, filled and packed rows."""
        for model in self._sizes.models:
            for shape in (self._sizes.filled, self._sizes.packed):
                result = self._step(model, shape, profiled=True)
                if result.values:
                    self._steps[model.name, shape.name] = result.values
                yield result

    def kernels(self) -> Iterator[Row]:
        """Kernels of the section `steps`."""
        if not self._steps:
            yield Row("kernels", "no step was measured", "skipped")
        for (model, shape), step in self._steps.items():
            share = step["without_kernel"]
            text = "not measured: no device" if share is None else f"{share:.1%} of a profiled step"
            yield Row(f"{model}, {shape}: no kernel runs in", text, values={"without_kernel": share})
            for kernel in step["kernels"]:
                numbers = f"{kernel['share']:6.1%} {kernel['milliseconds']:9.2f} ms {kernel['calls']:5d} x"
                yield Row("", f"{numbers}  {' '.join(kernel['name'].split())[:90]}", values=kernel)

    def transformers(self) -> Iterator[Row]:
        """In turns with `transformers`."""
        sizes, model, shape = self._sizes, self._sizes.models[0], self._sizes.filled
        candidates = self._fitting(model, shape, room=ROOM / 2)  # both sides are on the device at once
        if candidates.state != "ok":
            yield row(model.name, candidates)
            return
        same = ("modules.images.encoder.activation=gelu_tanh",)  # that of the reference
        options = {"te": self._te, "rounds": sizes.rounds, "recorded": sizes.timed}
        for compiled in sizes.compilers:
            for name, changes in candidates.value:
                outcome = self._job(
                    runs.versus, **self._options(model, shape, (*changes, *same)), **options, compiled=compiled
                )
                result = row(f"{f'compiled ({compiled})' if compiled else 'eager'}; {name}", outcome, _versus_text)
                if "OutOfMemoryError" not in outcome.text:
                    break
            yield result

    def fp8(self) -> Iterator[Row]:
        """The largest measured model up to the second: fp8 pays from 3 billion parameters."""
        sizes = self._sizes
        measured = [model for model in sizes.models[:2] if (model.name, sizes.filled.name) in self._steps]
        model = (measured or sizes.models[:2])[-1]
        if not self._te:
            yield Row("steps in fp8", NO_ENGINE, "skipped")
            return
        plain = self._step(model, sizes.filled)
        yield _against(
            plain.values, "steps in fp8 against bf16", self._step(model, sizes.filled, ("train.fp8=tensorwise",))
        )

    def compiled(self) -> Iterator[Row]:
        """torch's layers."""
        sizes, model = self._sizes, self._sizes.models[0]
        plain = self._step(model, sizes.filled, te=False)
        yield plain
        compiled = self._step(model, sizes.filled, ("train.compile=layers",), te=False)
        yield _against(plain.values, "torch's layers, compiled against not", compiled)

    def variants(self) -> Iterator[Row]:
        """Frozen encoder, LoRA, packed and padded rows."""
        sizes, model = self._sizes, self._sizes.models[0]
        plain = self._step(model, sizes.filled)
        for what, changes in VARIANTS.items():
            yield _against(plain.values, what, self._step(model, sizes.filled, changes))
        padded = self._step(model, sizes.padded)
        yield padded
        yield _against(padded.values, "packed against padded", self._step(model, sizes.packed))

    @cached_property
    def _te(self) -> bool:
        return self._sizes.device == "cuda" and bool(self.machine.value["packages"]["transformer-engine"])

    def _absent(self, name: str) -> Outcome | None:
        if self.machine.state != "ok" or name == "device":
            return None if self.machine.state == "ok" else self.machine
        no_device = self._sizes.device == "cuda" and not self.machine.value["gpus"]
        return Outcome("skipped", text="no CUDA device") if no_device else None

    def _job(self, function: Callable[..., Any], **arguments: Any) -> Outcome:
        """Run a job in the time that the section has left."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            return Outcome("ended", text="not run: the section's time is over")
        return self._jobs.run(function, remaining, **arguments)

    def _options(self, model: Model, shape: Shape, changes: tuple[str, ...]) -> dict[str, Any]:
        return {
            "config": CONFIG,
            "folder": tempfile.mkdtemp(dir=self._jobs.folder),
            "device": self._sizes.device,
            "overrides": [*COMMON, *model.changes, *shape.changes, *changes],
            "image": model.image,
            "characters": shape.characters,
        }

    def _fitting(self, model: Model, shape: Shape, changes: tuple[str, ...] = (), room: float = ROOM) -> Outcome:
        """The candidates of a shape that fit by their estimates, the largest first: (name, changes)."""
        candidates = [(name, (*candidate, *changes)) for name, candidate in shape.candidates.items()]
        if self._sizes.device == "cpu":
            return Outcome("ok", candidates)
        overrides = [[*COMMON, *model.changes, *shape.changes, *candidate] for _, candidate in candidates]
        estimates = self._job(runs.estimates, config=CONFIG, candidates=overrides, of_device=self._sizes.device)
        if estimates.state != "ok":
            return estimates
        memory = self.machine.value["gpus"][0]["memory"]
        sizes = zip(candidates, estimates.value, strict=True)
        fitting = [candidate for candidate, size in sizes if size / 2**30 <= room * memory]
        text = f"needs {min(estimates.value) / 2**30:.1f} GiB, of {room:.0%} of the device's {memory:.0f}"
        return Outcome("ok", fitting) if fitting else Outcome("skipped", text=text)

    def _step(
        self,
        model: Model,
        shape: Shape,
        changes: tuple[str, ...] = (),
        *,
        te: bool | None = None,
        profiled: bool = False,
    ) -> Row:
        """Steps of the largest candidate that fits; of the next one where the device runs out of memory. Steps that
        were measured before are not repeated.

        Args:
            te: layers of Transformer Engine, not of torch; None: if it is installed.
            profiled: with one more step, for its kernels.
        """
        te = self._te if te is None else te
        key = model.name, shape.name, changes, te
        if key not in self._rows:
            result = self._measured(model, shape, changes, te, profiled)
            if result.values is None:
                return result
            self._rows[key] = result
        return self._rows[key]

    def _measured(self, model: Model, shape: Shape, changes: tuple[str, ...], te: bool, profiled: bool) -> Row:
        what = f"{model.name}, {shape.name}{', torch layers' if self._te and not te else ''}"
        candidates = self._fitting(model, shape, changes)
        if candidates.state != "ok":
            return row(what, candidates)
        for name, candidate in candidates.value:
            outcome = self._job(
                runs.steps,
                **self._options(model, shape, candidate),
                te=te,
                compiler=self._sizes.compilers[-1],
                varied=shape.varied,
                profiled=profiled,
                warm_up=self._sizes.warm_up,
                timed=self._sizes.timed,
            )
            if outcome.state != "ok" or "out_of_memory" not in outcome.value:
                return row(f"{what}: {name}", outcome, lambda value: _step_text(value, self._ceiling))
        return row(what, Outcome("failed", text=outcome.value["out_of_memory"]))


def _against(other: dict[str, Any] | None, what: str, step: Row) -> Row:
    """A row of steps with its samples/s relative to those of another."""
    if step.values and other:
        ratio = step.values["samples_per_second"] / other["samples_per_second"]
        return Row(what, f"x {ratio:.2f} in samples/s; {step.result}", values=step.values | {"ratio": ratio})
    return Row(f"{what}: {step.what}", step.result, step.state, step.details, step.values)


def _compared(what: str, reference: dict[str, Any], outcome: Outcome, curve: Curve) -> Row:
    value = outcome.value
    loss, norm = (_largest_difference(reference[name], value[name]) for name in ("losses", "norms"))
    text = f"{len(value['losses'])} steps, relative difference {loss:.1e} of losses, {norm:.1e} of gradient norms"
    text += f"; over {value['backend']}, {value['te_modules']} modules of Transformer Engine, {value['graphs']} graphs"
    faults = [
        *([] if loss <= curve.bound else [f"MORE THAN {curve.bound:g}"]),  # NaN is not below it
        *(["NO MODULE OF TRANSFORMER ENGINE"] if curve.te and not value["te_modules"] else []),
        *(["NOTHING WAS COMPILED"] if curve.compiled and not value["graphs"] else []),
    ]
    numbers = {"losses": loss, "norms": norm, "graphs": value["graphs"]}
    return Row(what, "; ".join([text, *faults]), "failed" if faults else "ok", values=numbers)


def _largest_difference(reference: list[float], values: list[float]) -> float:
    differences = [abs(a - b) / abs(a) for a, b in zip(reference, values, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("nan")


def _matmul_text(value: dict[str, Any], reference: float | None, of: str) -> str:
    text = f"{value['median']:.3g} TFLOP/s (lowest {value['lowest']:.3g}, highest {value['highest']:.3g})"
    return f"{text}, {value['median'] / reference:.0%} {of.format(reference)}" if reference else text


def _step_text(value: dict[str, Any], ceiling: float | None) -> str:
    text = (
        f"{value['step_seconds'] * 1000:.1f} ms a step ({value['fastest'] * 1000:.1f} to "
        f"{value['slowest'] * 1000:.1f}, median of {value['steps']}), {value['tokens_per_second']:,.0f} tokens/s, "
        f"{value['samples_per_second']:.2f} samples/s, {value['tflops']:.3g} TFLOP/s, waits for data for "
        f"{value['data_wait']:.1%} of it"
    )
    if "mfu" in value:
        text += f", MFU {value['mfu']:.1%} (images {value['mfu/images']:.1%}, language {value['mfu/language']:.1%})"
    if ceiling:
        text += f", {value['tflops'] / ceiling:.1%} of the ceiling"
    text += f"; {value['parameters'] / 1e9:.3g} billion parameters; estimate {value['estimate']:.2f} GiB, peak "
    memory = value["memory"]
    return text + (f"{memory:.2f} GiB, x {memory / value['estimate']:.3f}" if memory else "not measured")


def _versus_text(value: dict[str, Any]) -> str:
    ratio = value["ratio"]
    (other, reference), (_, ours) = value["seconds"].items()
    their_memory, memory = value["memory"].values()
    return (
        f"seconds x {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, {value['rounds']} rounds): "
        f"{ours * 1000:.1f} ms a step, {other} {reference * 1000:.1f}; peak {memory / 2**30:.2f} GiB, {other} "
        f"{their_memory / 2**30:.2f}, x {memory / their_memory:.2f}"
    )


@dataclass(frozen=True)
class Section:
    """One part of the table.

    Attributes:
        goal: the result that is wanted.
        seconds: its time limit.
    """

    title: str
    goal: str
    seconds: float
    rows: Callable[[Sections], Iterator[Row]]


SECTIONS = {
    "device": Section("hardware and versions", "", 30, Sections.device),
    "ceiling": Section("TFLOP/s of bf16 and fp8 matmuls", "", 30, Sections.ceiling),
    "losses": Section("losses of 20 steps against the CPU's", "1e-3 in fp32, 5e-2 in bf16", 110, Sections.losses),
    "tests": Section("tests/gpu", "all pass", 100, Sections.tests),
    "steps": Section(
        "steps of 1B, 3B and 7B models in bf16",
        "50 % of the ceiling; peak memory within 5 % of the estimate; no wait for data",
        190,
        Sections.steps,
    ),
    "kernels": Section("heaviest kernels, and time without one", "no kernel in at most 3 %", 5, Sections.kernels),
    "transformers": Section(
        "steps in turns with `transformers`", "1 / 1.3 of its seconds, at most its memory", 105, Sections.transformers
    ),
    "fp8": Section("steps in fp8 against bf16", "1.25 x", 40, Sections.fp8),
    "compiled": Section("compiled layers against not", "", 50, Sections.compiled),
    "variants": Section("frozen encoder, LoRA, packed against padded rows", "", 90, Sections.variants),
}
"""All sections, in their order."""
