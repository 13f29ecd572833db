"""Size and structure of the code, in one table.

    python scripts/house.py             # a table of sizes, imports, config keys and commands
    python scripts/house.py --trace     # also which of our files and functions a run executes (about a minute)

The traced run is `vlm_digits` on one process: its set-up, and its second training step. Only functions of our three
packages on the main thread are counted. Processor seconds are the smallest of three runs.
"""

import argparse
import ast
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mimo_train", "data", "encoders")
SMALL_FILE = 60  # lines
TRACED_STEP = 2
RUN = ["vlm_digits", "layout=one_process", "train.iters=3", "train.eval_interval=0", "checkpoint.save_interval=0"]

Row = tuple[str, str]


def files(*folders: str) -> list[Path]:
    """The Python files under `folders` of this checkout."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of every import in `path`, those inside functions included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def import_levels(folder: str) -> int:
    """Return the number of files on the longest chain of imports between the files of `folder`."""
    modules = {module_name(path): path for path in files(folder)}

    @cache
    def height(module: str) -> int:
        targets = {name if name in modules else name.rpartition(".")[0] for name in imports(modules[module])}
        return 1 + max((height(target) for target in targets & modules.keys() - {module}), default=0)

    return max(map(height, modules))


def config_keys() -> int:
    """Return the number of keys of a config, each section and one module counted once, without sizes of models."""
    from encoders.projectors.spec import ProjectorSpec
    from mimo_train.config.llm_spec import LlmSpec
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import ModuleConfig

    def leaves(cls: type) -> int:
        total = 0
        for field in dataclasses.fields(cls):
            default: Any = field.default_factory if field.default_factory is not dataclasses.MISSING else None
            if cls is ConfigContainer and field.name == "modules":
                default = ModuleConfig
            is_section = isinstance(default, type) and dataclasses.is_dataclass(default)
            total += leaves(default) if is_section and default not in (LlmSpec, ProjectorSpec) else 1
        return total

    return leaves(ConfigContainer)


def processor_seconds(*arguments: str) -> float:
    """Return the processor seconds of `mimo-train ARGUMENTS`, the least of three runs."""

    def measure() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "mimo_train.cli", *arguments], cwd=ROOT, capture_output=True, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(measure() for _ in range(3))


def sizes() -> Iterator[Row]:
    product = files(*PACKAGES)
    small = [path for path in product if path.name != "__init__.py" and len(path.read_text().splitlines()) < SMALL_FILE]
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    yield f"lines of {', '.join(PACKAGES)}", f"{lines(product):,}"
    yield "files", f"{len(product)}"
    yield "lines per file", f"{lines(product) / len(product):.0f}"
    yield f"files under {SMALL_FILE} lines, without __init__.py", f"{len(small)}"
    yield "levels of imports in data/", f"{import_levels('data')}"
    yield "modules directly in data/", f"{len(list((ROOT / 'data').glob('[!_]*.py')))}"
    yield "lines of tests/", f"{lines(files('tests')):,}"
    yield "docs and README, KB", f"{sum(page.stat().st_size for page in pages) / 1000:.0f}"
    yield "lines of README", f"{len((ROOT / 'README.md').read_text().splitlines())}"
    yield "config keys", f"{config_keys()}"


def commands() -> Iterator[Row]:
    yield "processor seconds of --help", f"{processor_seconds('--help'):.2f}"
    yield "... of check with an unknown key", f"{processor_seconds('check', 'vlm_digits', 'train.itres=1'):.2f}"
    batch = "train.global_batch_size=17"
    yield "... of check with an arithmetic error", f"{processor_seconds('check', 'vlm_digits', batch):.2f}"


def traced() -> Iterator[Row]:
    """Run training in a process of its own and yield what its set-up and one step execute."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "trace.json"
        arguments = [sys.executable, __file__, "--record", str(result), *RUN, f"run.dir={folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1200)
        counts = json.loads(result.read_text())
    for flow, (num_files, num_functions) in counts.items():
        yield f"files / functions executed by {flow}", f"{num_files} / {num_functions}"


def record(result: Path, overrides: list[str]) -> None:
    """Train as `mimo-train train` does, and write `{flow: [files, functions]}` to `result`."""
    from mimo_train.training import loop, pretrain

    inside = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
    counts: dict[str, list[int]] = {}

    def counting(flow: str, call: Callable[[], Any]) -> Any:
        executed: set[tuple[str, str]] = set()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(inside) and code.co_name != "<module>":
                executed.add((code.co_filename, code.co_qualname))

        sys.setprofile(note)
        try:
            return call()
        finally:
            sys.setprofile(None)
            counts[flow] = [len({file for file, _ in executed}), len(executed)]

    setup, make_step, steps = pretrain.setup, loop.train_step, iter(range(1, 1 << 30))

    def traced_step(*arguments: Any) -> Any:
        if next(steps) != TRACED_STEP:
            return make_step(*arguments)
        return counting("one training step", lambda: make_step(*arguments))

    pretrain.setup = lambda *arguments, **options: counting("set-up", lambda: setup(*arguments, **options))
    loop.train_step = traced_step
    from mimo_train.config import compose

    pretrain.pretrain(compose.load(overrides[0], overrides[1:]))
    result.write_text(json.dumps(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="also trace a run")
    parser.add_argument("--record", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        record(Path(arguments.record[0]), arguments.record[1:])
        return
    rows = [*sizes(), *commands(), *(traced() if arguments.trace else ())]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:{width}}  {value:>12}" for name, value in rows))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed
    main()
