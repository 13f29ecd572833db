"""The checks: each asks for jobs and says in lines what they gave."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_check import runs, work
from benchmarks.gpu_check.jobs import Jobs, Outcome

NO_CUDA = Outcome("skipped", text="no CUDA device")


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        what: what was looked at.
        result: what was found, or why nothing was.
        state: ok, skipped, failed or ended.
        details: the last lines of a traceback.
    """

    what: str
    result: str
    state: str = "ok"
    details: str = ""


@dataclass(frozen=True)
class Sizes:
    """How large everything is: on a GPU, and in a rehearsal on a CPU."""

    matmul: int = 8192
    repeats: int = 50
    samples: int = 480
    steps: int = 20
    tests: tuple[str, ...] = ("tests/gpu",)
    curve: tuple[str, ...] = ()
    large: tuple[tuple[float, str, tuple[str, ...]], ...] = (
        (100, "8 samples of 2048 tokens", ("train.micro_batch_size=8", "train.global_batch_size=16")),
        (56, "4 samples of 2048 tokens", ("train.micro_batch_size=4", "train.global_batch_size=8")),
        (
            36,
            "2 samples of 2048 tokens, everything recomputed",
            ("train.micro_batch_size=2", "train.global_batch_size=8", "train.recompute=full"),
        ),
    )
    """GiB of the device that it needs, what a microbatch is, and the changes for it; the largest first."""
    model: tuple[str, ...] = (
        "encoder@modules.images.encoder=vit_l14_336",
        "llm@modules.language.llm=llama_1b",
        "data.sequence_length=2048",
    )
    image: int = 336
    warm_up: int = 4
    timed: int = 10


_TINY_LLM = tuple(
    f"modules.language.llm.{size}"
    for size in ("num_layers=2", "hidden_size=32", "ffn_hidden_size=64", "num_attention_heads=4")
)
REHEARSAL = Sizes(
    matmul=128,
    repeats=3,
    samples=48,
    steps=3,
    tests=("tests/gpu/test_stopwatch.py",),
    curve=(*_TINY_LLM, "train.global_batch_size=4", "train.micro_batch_size=2"),
    large=((0, "2 samples of 64 tokens", ("train.micro_batch_size=2", "train.global_batch_size=4")),),
    model=("data.sequence_length=64", *_TINY_LLM),
    image=48,
    warm_up=1,
    timed=2,
)
"""What the same checks are in a test, on a CPU."""


class Checks:
    """All checks of one machine.

    Args:
        device: cuda, or cpu for a rehearsal.
        tests_seconds: that tests/gpu may take.
    """

    def __init__(self, jobs: Jobs, device: str = "cuda", tests_seconds: float = 240):
        self._jobs, self._device, self._tests_seconds = jobs, device, tests_seconds
        self._sizes = Sizes() if device == "cuda" else REHEARSAL

    @cached_property
    def machine(self) -> Outcome:
        """Of the machine and the software, see `work.versions`."""
        return self._jobs.run_alone(work.versions, 60)

    def run(self, name: str) -> Iterator[Line]:
        """The lines of one check."""
        check = CHECKS[name]
        absent = None if name == "device" else self._absent()
        yield from [line(name, absent)] if absent else check(self)

    def _absent(self) -> Outcome | None:
        if self.machine.state != "ok":
            return self.machine
        if self.machine.value["torch"] is None:
            return Outcome("skipped", text="not installed: torch")
        return NO_CUDA if self._device == "cuda" and not self.machine.value["gpus"] else None

    def device(self) -> Iterator[Line]:
        """driver, device, torch, megatron-core, Transformer Engine"""
        if self.machine.state != "ok":
            yield line("machine", self.machine)
            return
        found = self.machine.value
        yield Line("driver", found["driver"] or "absent")
        for gpu in found["gpus"]:
            yield Line("device", f"{gpu['name']}, {gpu['memory']:.1f} GiB, compute capability {gpu['capability']}")
        if "fault" in found:
            yield Line("device", found["fault"], "failed")
        elif not found["gpus"]:
            yield line("device", NO_CUDA)
        yield Line("processor", f"{found['cpu']}, {found['memory']:.0f} GiB")
        torch = found["torch"] and f"{found['torch']} with CUDA {found['cuda']}"
        if found.get("nccl"):
            torch += f", cuDNN {found['cudnn']}, NCCL {found['nccl']}"
        yield Line("Python", found["python"])
        yield Line("torch", torch or "absent")
        for package, version in found["packages"].items():
            yield Line(package, version or "absent")

    def matmul(self) -> Iterator[Line]:
        """what a large bf16 matrix product reaches"""
        sizes = self._sizes
        found = self._jobs.run(work.matmul, 40, device=self._device, size=sizes.matmul, repeats=sizes.repeats)
        yield line(f"bf16 {sizes.matmul} x {sizes.matmul} x {sizes.matmul}", found, matmul_text)

    def losses(self) -> Iterator[Line]:
        """the first 20 losses, against the CPU's"""
        sizes, jobs = self._sizes, self._jobs
        made = jobs.run(runs.demos, 60, folder=str(jobs.folder / "demo"), samples=sizes.samples)
        if made.state != "ok":
            yield line("demo data", made)
            return
        for config, layout, variants in VARIANTS:
            common = [layout, f"train.iters={sizes.steps}", "optim.decay=constant", *sizes.curve]

            def trained(name, device, precision="fp32", te=False, compiled=False, config=config, common=common):
                return jobs.run(
                    runs.curve,
                    120 if compiled else 60,
                    config=config,
                    shards=made.value[config],
                    run_dir=str(jobs.folder / re.sub(r"\W+", "_", f"{config} {name}")),
                    device=device,
                    overrides=[*common, f"train.precision={precision}"],
                    te=te,
                    compiled=compiled,
                )

            reference = trained("reference", "cpu")
            yield line(f"{config} on the CPU, fp32", reference, _first_and_last)
            if reference.state != "ok":
                continue
            for name, bound, options in variants:
                found = trained(name, self._device, **options)
                yield _compared(f"{config} on {self._device}, {name}", reference.value, found, bound, options)

    def step(self) -> Iterator[Line]:
        """seconds of a step, tokens a second and MFU of a model of a billion parameters"""
        for te, (size, found) in self._large.items():
            yield line(_layers(te), found, lambda value, size=size: _step(value, size))

    def kernels(self) -> Iterator[Line]:
        """the ten heaviest kernels of that step"""
        for te, (_, found) in self._large.items():
            if found.state != "ok":
                yield line(_layers(te), found)
                continue
            for kernel in found.value["kernels"]:
                numbers = f"{kernel['share']:6.1%} {kernel['milliseconds']:9.2f} ms {kernel['calls']:5d} x"
                yield Line(_layers(te), f"{numbers}  {' '.join(kernel['name'].split())[:90]}")

    def tests(self) -> Iterator[Line]:
        """tests/gpu: passed, failed, skipped"""
        report = self._jobs.folder / "tests.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            work.require("pytest")
        except work.Missing as missing:
            yield line(self._sizes.tests[0], Outcome("skipped", text=str(missing)))
            return
        found = self._jobs.command(
            [sys.executable, "-P", "-m", "pytest", *options, *self._sizes.tests], self._tests_seconds
        )
        if found.state == "ok" and not report.exists():
            found = Outcome("failed", text=found.value[1])
        if found.state != "ok":
            yield line(self._sizes.tests[0], found)
            return
        yield from _tests(self._sizes.tests[0], ElementTree.parse(report))

    @cached_property
    def _large(self) -> dict[bool, tuple[str, Outcome]]:
        """Transformer Engine's layers or torch's -> what a microbatch was, and what `runs.large` found."""
        return {te: self._fitting(te) for te in (False, True)}

    def _fitting(self, te: bool) -> tuple[str, Outcome]:
        """Of the largest microbatch that fits the device."""
        sizes = self._sizes
        memory = self.machine.value["gpus"][0]["memory"] if self._device == "cuda" else 0
        least = min(needed for needed, *_ in sizes.large)
        found = Outcome("skipped", text=f"the device has {memory:.0f} GiB, the model needs {least:.0f}")
        size = ""
        for number, (needed, size, overrides) in enumerate(sizes.large):
            if memory < needed:
                continue
            found = self._jobs.run(
                runs.large,
                110,
                config="vlm_digits",
                folder=str(self._jobs.folder / f"large-{te}-{number}"),
                device=self._device,
                overrides=[*LARGE, *sizes.model, *overrides],
                te=te,
                image=sizes.image,
                warm_up=sizes.warm_up,
                timed=sizes.timed,
            )
            if found.state != "ok" or "out_of_memory" not in found.value:
                break
            found = Outcome("failed", text=f"{size}: {found.value['out_of_memory']}")
        return size, found


CHECKS: dict[str, Callable[[Checks], Iterator[Line]]] = {
    check.__name__: check
    for check in (Checks.device, Checks.matmul, Checks.losses, Checks.step, Checks.kernels, Checks.tests)
}
"""Every check by name, in their order; the docstring says what it shows."""

VARIANTS = (
    (
        "vlm_digits",
        "layout=one_process",
        (
            ("fp32, torch layers", 1e-3, {}),
            ("bf16, torch layers", 5e-2, {"precision": "bf16"}),
            ("fp32, te layers", 1e-3, {"te": True}),
            ("bf16, te layers", 5e-2, {"precision": "bf16", "te": True}),
        ),
    ),
    (
        "gpt_tiny",
        "layout=language_one",
        (("fp32", 1e-3, {}), ("fp32, layers compiled", 1e-3, {"compiled": True})),
    ),
)
"""Config, layout, and what is compared with the CPU: name, largest relative difference that is well, and options."""

LARGE = ("layout=one_process", "train.precision=bf16", "train.iters=1000", "optim.lr=1e-5", "data.workers=8")


def line(what: str, outcome: Outcome, show: Callable[[Any], str] = str) -> Line:
    """The line of an outcome, whose value `show` puts into words."""
    if outcome.state == "ok":
        return Line(what, show(outcome.value))
    if outcome.state == "failed":  # the last line of a traceback says what
        before, _, last = outcome.text.rpartition("\n")
        return Line(what, last, "failed", before)
    first, _, rest = outcome.text.partition("\n")
    return Line(what, first, outcome.state, rest)


def matmul_text(found: dict[str, Any]) -> str:
    text = f"{found['median']:.3g} TFLOP/s (lowest {found['lowest']:.3g}, highest {found['highest']:.3g})"
    return f"{text}, {found['median'] / found['peak']:.0%} of {found['peak']:g}" if found["peak"] else text


def _first_and_last(found: dict[str, Any]) -> str:
    losses = found["losses"]
    return f"{len(losses)} losses, {losses[0]:.6f} to {losses[-1]:.6f}; what the others are compared with"


def _compared(what: str, reference: dict[str, Any], found: Outcome, bound: float, options: dict[str, Any]) -> Line:
    if found.state != "ok":
        return line(what, found)
    value = found.value
    loss, norm = (_largest_difference(reference[name], value[name]) for name in ("losses", "norms"))
    text = f"largest relative difference {loss:.1e} of losses, {norm:.1e} of gradient norms"
    notes = [f"over {value['backend']}"]
    if options.get("te"):
        notes.append(f"{value['te_modules']} modules of Transformer Engine")
    if options.get("compiled"):
        notes.append(f"{value['graphs']} graphs compiled")
    text = f"{text}; {', '.join(notes)}"
    if options.get("compiled") and not value["graphs"]:
        return Line(what, f"{text}: NOTHING WAS COMPILED", "failed")
    if not loss <= bound:  # NaN is not
        return Line(what, f"{text}: MORE THAN {bound:g}", "failed")
    return Line(what, text)


def _largest_difference(one: list[float], other: list[float]) -> float:
    differences = [abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("nan")


def _layers(te: bool) -> str:
    return "te layers" if te else "torch layers"


def _step(found: dict[str, Any], size: str) -> str:
    median, fastest, slowest = (found[name] * 1000 for name in ("step_seconds", "fastest", "slowest"))
    text = (
        f"{median:.1f} ms a step ({fastest:.1f} to {slowest:.1f}, median of {found['steps']}), "
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['tflops']:.3g} TFLOP/s"
    )
    if "mfu" in found:
        text += f", MFU {found['mfu']:.1%} (images {found['mfu/images']:.1%}, language {found['mfu/language']:.1%})"
    text += f"; {found['parameters'] / 1e9:.2f} billion parameters, microbatches of {size}"
    return text + (f", {found['memory']:.1f} GiB" if found["memory"] else "")


def _tests(what: str, report: ElementTree.ElementTree) -> Iterator[Line]:
    cases = list(report.iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    numbers = f"{len(cases) - len(bad) - len(skipped)} passed, {len(bad)} failed, {len(skipped)} skipped"
    yield Line(what, numbers, "failed" if bad else "ok")
    for case in bad:
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        lines = [text for text in (fault.text or "").splitlines() if re.match(r"E  |\S+:\d+:", text)]
        yield Line(
            case.get("name", ""), (fault.get("message") or "").split("\n")[0][:200], "failed", "\n".join(lines[-12:])
        )
