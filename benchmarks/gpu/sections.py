"""The sections: each asks for jobs within its own time, and says in rows what they gave. One that fails is a row."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.gpu import work
from benchmarks.gpu.sizes import COMMON, GPU, TINY, Model, Shape
from benchmarks.gpu_check import checks
from benchmarks.gpu_check import work as machine_work
from benchmarks.gpu_check.checks import Line, line
from benchmarks.gpu_check.jobs import Jobs, Outcome

FORMULA = (
    "MFU = model FLOPs of a step / (seconds of the step x devices x peak FLOP/s in bf16, or fp8 where layers have it)"
)
CONFIG = "vlm_digits"
ROOM = 0.92
"""Share of the device's memory that an estimate may take."""


@dataclass(frozen=True)
class Row:
    """A line of the table, with its numbers."""

    line: Line
    values: Any = None


class Sections:
    """All sections of one machine.

    Args:
        tiny: a rehearsal on the CPU.
    """

    def __init__(self, jobs: Jobs, tiny: bool = False):
        self._jobs, self.sizes = jobs, TINY if tiny else GPU
        self._checks = checks.Checks(jobs, self.sizes.device, SECTIONS["b"].seconds)
        self._ends = 0.0
        self.ceiling: float | None = None
        """TFLOP/s of a matrix product, once it is measured."""
        self._steps: dict[tuple[str, str], dict[str, Any]] = {}
        """What (c) has found, by model and shape."""

    @cached_property
    def machine(self) -> Outcome:
        """Of the machine and the software, see `gpu_check.work.versions`."""
        return self._checks.machine

    def run(self, letter: str) -> Iterator[Row]:
        """The rows of one section."""
        section = SECTIONS[letter]
        self._ends = time.monotonic() + section.seconds
        absent = self._absent()
        if absent:
            yield Row(line(section.title, absent))
            return
        yield from section.rows(self)

    def ceiling_rows(self) -> Iterator[Row]:
        """(a)"""
        sizes = self.sizes
        found = self._job(machine_work.matmul, device=sizes.device, size=sizes.matmul, repeats=sizes.repeats)
        if found.state == "ok":
            self.ceiling = found.value["median"]
        yield Row(
            line(f"bf16 {sizes.matmul} x {sizes.matmul} x {sizes.matmul}", found, checks.matmul_text), found.value
        )

    def tests(self) -> Iterator[Row]:
        """(b)"""
        for one in self._checks.run("tests"):
            yield Row(one)

    def models(self) -> Iterator[Row]:
        """(c)"""
        yield Row(Line("the program's own accounting", FORMULA))
        if not self._te:
            yield Row(Line("layers", "torch's: Transformer Engine is not installed"))
        for model in self.sizes.models:
            for shape in (self.sizes.filled, self.sizes.packed):
                row = self._step(model, shape)
                if row.values:
                    self._steps[model.name, shape.name] = row.values
                yield row

    def versus(self) -> Iterator[Row]:
        """(d)"""
        sizes, model, shape = self.sizes, self.sizes.models[0], self.sizes.filled
        fits = self._fitting(model, shape, room=ROOM / 2)  # both are on the device at once
        if fits.state != "ok":
            yield Row(line(model.name, fits))
            return
        for compiled in sizes.compilers:
            how = f"compiled ({compiled})" if compiled else "eager"
            for name, changes in fits.value:
                found = self._job(
                    work.versus,
                    **self._options(model, shape, (*changes, "modules.images.encoder.activation=gelu_tanh")),
                    te=self._te,
                    compiled=compiled,
                    rounds=sizes.rounds,
                    recorded=sizes.timed,
                )
                row = Row(line(f"transformers, {how}; {name}", found, _versus_text), found.value)
                if "OutOfMemoryError" not in found.text:
                    break
            yield row

    def fp8_and_compiled(self) -> Iterator[Row]:
        """(e)"""
        sizes = self.sizes
        found = self._job(work.fp8_matmul, device=sizes.device, size=sizes.matmul, repeats=sizes.repeats)
        what = f"fp8 {sizes.matmul} x {sizes.matmul} x {sizes.matmul}"
        yield Row(line(what, found, lambda value: _fp8_text(value, self.ceiling)), found.value)
        # The largest that (c) has measured, up to the second: fp8 is for 3 billion parameters and up.
        known = [model for model in sizes.models[:2] if (model.name, sizes.filled.name) in self._steps]
        model = (known or sizes.models[:2])[-1]
        if self._te:
            row = self._step(model, sizes.filled, ("train.fp8=tensorwise",))
            yield self._against(self._steps.get((model.name, sizes.filled.name)), "steps in fp8 against bf16", row)
        else:
            yield Row(line("steps in fp8", Outcome("skipped", text="fp8 needs CUDA and Transformer Engine")))
        model = sizes.models[0]
        plain = None if self._te else self._steps.get((model.name, sizes.filled.name))
        if plain is None:
            row = self._step(model, sizes.filled, te=False)
            plain = row.values
            yield row
        compiled = self._step(model, sizes.filled, ("train.compile=layers",), te=False)
        yield self._against(plain, "torch's layers, compiled against not", compiled)

    def variants(self) -> Iterator[Row]:
        """(f)"""
        model, sizes = self.sizes.models[0], self.sizes
        whole = self._steps.get((model.name, sizes.filled.name))
        for what, changes in VARIANTS.items():
            yield self._against(whole, what, self._step(model, sizes.filled, changes))
        padded = self._step(model, sizes.padded)
        yield padded
        packed = self._step(model, sizes.packed)
        yield self._against(padded.values, "packed against padded", packed)

    def kernels(self) -> Iterator[Row]:
        """(g)"""
        if not self._steps:
            yield Row(line("kernels", Outcome("skipped", text="no step of (c) was measured")))
        for (model, shape), found in self._steps.items():
            share = found["without_kernel"]
            text = "not measured: no kernels of a device" if share is None else f"{share:.1%} of a profiled step"
            yield Row(Line(f"{model}, {shape}: no kernel runs in", text), {"without_kernel": share})
            for kernel in found["kernels"]:
                numbers = f"{kernel['share']:6.1%} {kernel['milliseconds']:9.2f} ms {kernel['calls']:5d} x"
                yield Row(Line("", f"{numbers}  {' '.join(kernel['name'].split())[:90]}"), kernel)

    def saves(self) -> Iterator[Row]:
        """(h)"""
        model, shape = self.sizes.models[0], self.sizes.filled
        smallest = list(shape.candidates.values())[-1]
        for asynchronous in (False, True):
            options = self._options(model, shape, (*smallest, *self.sizes.saved))
            found = self._job(work.saves, **options, te=self._te, before=5, asynchronous=asynchronous)
            what = f"{'asynchronous' if asynchronous else 'synchronous'} save, {model.name}"
            yield Row(line(f"{what}{', 4 layers' if self.sizes.saved else ''}", found, _saves_text), found.value)

    def reading(self) -> Iterator[Row]:
        """(i)"""
        model, shape, sizes = self.sizes.models[0], self.sizes.filled, self.sizes
        batch = next(iter(shape.candidates.values()))
        # The smallest model that reads the same samples.
        small = (f"data.workers={sizes.workers}", "modules.language.llm.num_layers=1", "train.recompute=none")
        options = self._options(model, shape, (*batch, *small, "modules.images.encoder.num_layers=1"))
        found = self._job(work.reading, **options, steps=sizes.read_steps)
        wanted = (self._steps.get((model.name, shape.name)) or {}).get("samples_per_second")
        yield Row(
            line(f"{sizes.workers} threads", found, lambda value: _reading_text(value, wanted)),
            found.value and found.value | {"wanted": wanted},
        )

    @cached_property
    def _te(self) -> bool:
        return self.sizes.device == "cuda" and bool(self.machine.value["packages"]["transformer-engine"])

    def _absent(self) -> Outcome | None:
        if self.machine.state != "ok":
            return self.machine
        if self.machine.value["torch"] is None:
            return Outcome("skipped", text="not installed: torch")
        return checks.NO_CUDA if self.sizes.device == "cuda" and not self.machine.value["gpus"] else None

    def _job(self, function: Callable[..., Any], **arguments: Any) -> Outcome:
        """A job in what is left of the section's time."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return Outcome("ended", text="not run: the section's time is over")
        return self._jobs.run(function, left, **arguments)

    def _options(self, model: Model, shape: Shape, changes: tuple[str, ...]) -> dict[str, Any]:
        return {
            "config": CONFIG,
            "folder": tempfile.mkdtemp(dir=self._jobs.folder),
            "device": self.sizes.device,
            "overrides": [*COMMON, *model.changes, *shape.changes, *changes],
            "image": model.image,
            "characters": shape.characters,
        }

    def _fitting(self, model: Model, shape: Shape, changes: tuple[str, ...] = (), room: float = ROOM) -> Outcome:
        """The candidates of a shape that fit by their estimates, the largest first: (what it is, its changes)."""
        every = [(name, (*candidate, *changes)) for name, candidate in shape.candidates.items()]
        overrides = [[*COMMON, *model.changes, *shape.changes, *candidate] for _, candidate in every]
        found = self._job(work.estimates, config=CONFIG, candidates=overrides, of_device=self.sizes.device)
        if found.state != "ok" or self.sizes.device == "cpu":
            return found if found.state != "ok" else Outcome("ok", every)
        memory = self.machine.value["gpus"][0]["memory"]
        fits = [one for one, size in zip(every, found.value, strict=True) if size / 2**30 <= room * memory]
        if fits:
            return Outcome("ok", fits)
        text = f"needs {min(found.value) / 2**30:.1f} GiB, of {room:.0%} of the device's {memory:.0f}"
        return Outcome("skipped", text=text)

    def _step(self, model: Model, shape: Shape, changes: tuple[str, ...] = (), *, te: bool | None = None) -> Row:
        """Steps of the largest candidate that fits, the next one where the device disagrees.

        Args:
            te: layers of Transformer Engine, or of torch; None: as the machine has them.
        """
        te = self._te if te is None else te
        what = f"{model.name}, {shape.name}{', torch layers' if self._te and not te else ''}"
        fits = self._fitting(model, shape, changes)
        if fits.state != "ok":
            return Row(line(what, fits))
        for name, candidate in fits.value:
            found = self._job(
                work.steps,
                **self._options(model, shape, candidate),
                te=te,
                compiler=self.sizes.compilers[-1],
                varied=shape.varied,
                warm_up=self.sizes.warm_up,
                timed=self.sizes.timed,
            )
            if found.state != "ok":
                return Row(line(f"{what}: {name}", found))
            if "out_of_memory" not in found.value:
                return Row(line(f"{what}: {name}", found, lambda value: _step_text(value, self.ceiling)), found.value)
        return Row(line(what, Outcome("failed", text=found.value["out_of_memory"])))

    def _against(self, other: dict[str, Any] | None, what: str, row: Row) -> Row:
        """A row with its rate over that of another."""
        text = row.line.result
        if row.values and other:
            ratio = row.values["samples_per_second"] / other["samples_per_second"]
            text = f"x {ratio:.2f} in samples/s; {text}"
            return Row(Line(what, text), row.values | {"ratio": ratio})
        return Row(Line(f"{what}: {row.line.what}", text, row.line.state, row.line.details), row.values)


VARIANTS = {
    "encoder frozen": ("modules.images.freeze=[encoder]",),
    "LoRA of rank 16, encoder frozen": ("modules.images.freeze=[encoder]", "modules.language.lora.rank=16"),
}


def _step_text(found: dict[str, Any], ceiling: float | None) -> str:
    text = (
        f"{found['step_seconds'] * 1000:.1f} ms a step ({found['fastest'] * 1000:.1f} to "
        f"{found['slowest'] * 1000:.1f}, median of {found['steps']}), {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['samples_per_second']:.2f} samples/s, {found['tflops']:.3g} TFLOP/s"
    )
    if "mfu" in found:
        text += f", MFU {found['mfu']:.1%}"
    if ceiling:
        text += f", {found['tflops'] / ceiling:.1%} of (a)"
    text += f"; {found['parameters'] / 1e9:.3g} billion parameters"
    memory, estimate = found["memory"], found["estimate"]
    return f"{text}; estimate {estimate:.2f} GiB" + (f", peak {memory:.2f} GiB" if memory else ", peak not measured")


def _fp8_text(found: dict[str, Any], ceiling: float | None) -> str:
    text = f"{found['median']:.3g} TFLOP/s (lowest {found['lowest']:.3g}, highest {found['highest']:.3g})"
    return f"{text}, x {found['median'] / ceiling:.2f} of (a), the most that fp8 can give a step" if ceiling else text


def _versus_text(found: dict[str, Any]) -> str:
    ratio = found["ratio"]
    (other, reference), (_, ours) = found["seconds"].items()
    of_other, own = found["memory"].values()
    return (
        f"seconds x {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, {found['rounds']} rounds): "
        f"{ours * 1000:.1f} ms a step, {other} {reference * 1000:.1f}; peak {own / 2**30:.2f} GiB, {other} "
        f"{of_other / 2**30:.2f}, x {own / of_other:.2f}"
    )


def _saves_text(found: dict[str, Any]) -> str:
    return (
        f"training stands for {found['stall'] * 1000:.0f} ms ({found['bytes'] / 2**30:.3g} GiB); steps of "
        f"{found['usual'] * 1000:.1f} ms are {found['behind'] * 1000:.1f} ms behind it, complete after "
        f"{found['steps_in_flight']} steps"
    )


def _reading_text(found: dict[str, Any], wanted: float | None) -> str:
    text = f"{found['samples_per_second']:,.1f} samples/s read, decoded and put on the device"
    return f"{text}, x {found['samples_per_second'] / wanted:.2f} of what (c) takes" if wanted else text


@dataclass(frozen=True)
class Section:
    """One part of the benchmark and the seconds that it may take."""

    title: str
    seconds: float
    rows: Callable[[Sections], Iterator[Row]]


SECTIONS = {
    "a": Section("ceiling of the device", 25, Sections.ceiling_rows),
    "b": Section("tests/gpu", 50, Sections.tests),
    "c": Section("steps of three models in bf16", 180, Sections.models),
    "d": Section("against transformers", 105, Sections.versus),
    "e": Section("fp8 against bf16; compiled layers", 75, Sections.fp8_and_compiled),
    "f": Section("frozen encoder, LoRA, packed against padded", 70, Sections.variants),
    "g": Section("heaviest kernels, and time without one", 5, Sections.kernels),
    "h": Section("what a checkpoint stops", 45, Sections.saves),
    "i": Section("the data path", 30, Sections.reading),
}
"""Every section by its letter, in their order."""
