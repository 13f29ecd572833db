"""Imports point one way, what must stay light imports no torch, and files stay readable."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mimo_train", "encoders", "data")
LONGEST_FILE = 400  # lines

LEVELS = (
    {"config"},
    {"layout"},
    {"estimate"},
    {"inputs"},
    {"flight", "cpu"},
    {"parallel"},
    {"models", "logging"},
    {"optim", "launch"},
    {"checkpoint"},
    {"hf"},
    {"training.tasks"},
    {"training.step"},
    {"evaluation", "debug"},
    {"training", "run_dataset"},
    {"bridge", "engine"},
    {"preflight"},
    {"commands"},
    {"cli"},
)
"""The parts of mimo_train, lowest first: a part imports itself and the parts of lower levels. `training.step` is below
the rest of `training`, because evaluation runs its forward pass, whose losses are in `training.tasks`."""

LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}


def sources(root: Path) -> list[Path]:
    """The source files of the packages under ``root``."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def imports(path: Path, root: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, in functions too; of ``from a import b`` the name is ``a.b``."""
    found = []
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def part_of(names: list[str]) -> str:
    """Return the part of mimo_train that a dotted name, given in pieces, belongs to: the longest with a level.
    Families, and the specs of blocks, are data of the config."""
    if names[:1] == ["families"] or (names[:2] == ["models", "blocks"] and "module" not in names):
        return "config"
    return next((dotted for n in (2, 1) if (dotted := ".".join(names[:n])) in LEVEL), ".".join(names[:1]))


def wrong_arrows(root: Path) -> list[str]:
    """One line for each import under ``root`` that points the wrong way."""
    wrong = []
    for path in sources(root):
        package, *inner = path.relative_to(root).with_suffix("").parts
        for line, name in imports(path, root):
            other, *rest = name.split(".")
            if other not in PACKAGES:
                continue
            where = f"{path.relative_to(root)}:{line} imports {name}"
            if package != "mimo_train":
                if other != package:
                    wrong.append(f"{where}: {package} imports neither the other packages nor mimo_train")
            elif other == "mimo_train" and inner != ["__init__"]:
                part, target = part_of(inner), part_of(rest)
                if part not in LEVEL:
                    wrong.append(f"{where}: {part} has no level; give it one in {Path(__file__).name}")
                elif target in LEVEL and target != part and LEVEL[target] >= LEVEL[part]:
                    wrong.append(f"{where}: {target} is not below {part}")
    return wrong


def test_arrows_point_one_way():
    assert not wrong_arrows(ROOT)


def circles(root: Path) -> list[str]:
    """Files under ``root`` that import each other in a circle, one line for each file of one."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in sources(root)
    }
    arrows = {}
    for module, path in files.items():
        named = [name for _, name in imports(path, root)]
        targets = {name if name in files else name.rpartition(".")[0] for name in named}
        arrows[module] = targets & files.keys() - {module}
    # What imports nothing that is left, or is imported by nothing that is left, is in no circle.
    left = set(files)
    while bare := {one for one in left if not arrows[one] & left or not any(one in arrows[other] for other in left)}:
        left -= bare
    return [f"{one} -> {', '.join(sorted(arrows[one] & left))}" for one in sorted(left)]


def test_a_circle_is_found(tmp_path):
    for name, line in {
        "a": "from data.b import x",
        "b": "from data import c",
        "c": "def f():\n    import data.a",
    }.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.py").write_text(line + "\n")
    (tmp_path / "data" / "d.py").write_text("import data.a\n")
    assert circles(tmp_path) == ["data.a -> data.b", "data.b -> data.c", "data.c -> data.a"]


def test_there_is_no_circle():
    assert not circles(ROOT)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_pages_have_the_order_of_the_levels(page):
    order = " ".join((ROOT / page).read_text().split())
    order = order[order.index("cli -> commands") :].split(" -> config")[0] + " -> config"
    assert [set(re.findall(r"[\w.]+", parts)) for parts in order.split(" -> ")] == list(reversed(LEVELS))


def test_each_part_has_a_level():
    parts = {path.relative_to(ROOT / "mimo_train").parts[0] for path in (ROOT / "mimo_train").rglob("*.py")}
    assert {part_of([part.removesuffix(".py")]) for part in parts} - {"__init__"} <= LEVEL.keys()


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("mimo_train/parallel/a.py", "from mimo_train.training import loop", "training is not below parallel"),
        ("mimo_train/parallel/a.py", "from ..training import loop", "training is not below parallel"),
        (
            "mimo_train/parallel/bridge/a.py",
            "from ...training.step import batches",
            "training.step is not below parallel",
        ),
        ("mimo_train/parallel/a.py", "from mimo_train import training", "training is not below parallel"),
        (
            "mimo_train/models/a.py",
            "from ..training.step.pipeline import Pipeline",
            "training.step is not below models",
        ),
        ("mimo_train/models/a.py", "def f():\n    import mimo_train.optim.muon", "optim is not below models"),
        ("mimo_train/layout/a.py", "from mimo_train.parallel.device import x", "parallel is not below layout"),
        ("mimo_train/families/a.py", "from mimo_train.layout.ranks import x", "layout is not below config"),
        ("mimo_train/models/blocks/delta/spec.py", "import mimo_train.layout.ranks", "layout is not below config"),
        ("mimo_train/models/blocks/delta/module.py", "import mimo_train.models.norms", ""),
        ("mimo_train/models/blocks/delta/module.py", "import mimo_train.optim.muon", "optim is not below models"),
        ("mimo_train/novelty/a.py", "from mimo_train.config.schema import x", "novelty has no level"),
        ("encoders/native/a.py", "import mimo_train.config", "encoders imports neither"),
        ("encoders/native/a.py", "import data", "encoders imports neither"),
        ("data/a.py", "from encoders.base import num_tokens", "data imports neither"),
        ("mimo_train/training/a.py", "from mimo_train.models import build\nfrom .state import S\nimport data", ""),
        ("mimo_train/cli.py", "from mimo_train.commands import train\nfrom mimo_train.layout import ranks", ""),
        ("encoders/native/a.py", "from encoders.base import x\nfrom . import y\nimport torch", ""),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, file, line, complaint):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    found = wrong_arrows(tmp_path)
    assert (len(found) == 1 and complaint in found[0]) if complaint else not found, found


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)


LIGHT = (
    "mimo_train/config/**/*.py",
    "mimo_train/flight/*.py",
    "mimo_train/launch/[!t]*.py",
    "mimo_train/logging/[!r]*.py",
    "mimo_train/logging/rank_log.py",
    "mimo_train/logging/report/*.py",
    "mimo_train/logging/sinks/*.py",
    "mimo_train/families/*.py",
    "mimo_train/models/blocks/[!m]*.py",
    "mimo_train/models/blocks/*/spec.py",
    "mimo_train/layout/**/*.py",
    "mimo_train/estimate/**/*.py",
    "mimo_train/commands/**/*.py",
    "mimo_train/inputs/**/*.py",
    "mimo_train/preflight/check/**/*.py",
    "mimo_train/checkpoint/folders.py",
    "mimo_train/checkpoint/folder_changes.py",
    "mimo_train/checkpoint/inspection.py",
    "mimo_train/checkpoint/resume/config_diff.py",
    "mimo_train/checkpoint/resume/same_run.py",
    "mimo_train/cli.py",
    "mimo_train/evaluation/generation/options.py",
    "mimo_train/evaluation/generation/source.py",
    "mimo_train/evaluation/data_choice.py",
    "mimo_train/evaluation/layouts.py",
    "mimo_train/evaluation/metrics.py",
    "mimo_train/evaluation/normal_forms.py",
    "mimo_train/hf/parts.py",
    "mimo_train/hf/matching.py",
    "mimo_train/hf/llava_limits.py",
    "data/records/*.py",
    "data/text/*.py",
    "data/index/*.py",
    "data/rows/*.py",
    "data/order/*.py",
    "data/storage/*.py",
    "data/samples/media_spec.py",
    "encoders/**/spec.py",
    "encoders/**/weights.py",
    "encoders/registry.py",
    "encoders/native/vit/tower.py",
)
"""Patterns of files that import no torch, so that config errors and `check` are quick."""


def test_light_modules_import_no_torch():
    files = dict.fromkeys(path for pattern in LIGHT for path in ROOT.glob(pattern))
    light = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert {"mimo_train.config.keys", "mimo_train.inputs.datasets", "mimo_train.flight.recorder"} <= set(light)
    result = python(
        f"import importlib, sys\nfor name in {['mimo_train.preflight.check', *light]}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'megatron', 'transformers', 'pyarrow', 'huggingface_hub'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["world", "vlm_digits"],
        ["world", "vlm_digits", "x=1"],
        ["plan", "recipes/llava_1_5_finetune", "--gpus", "8"],
    ],
)
def test_quick_commands_import_no_torch(arguments):
    result = python(
        "import sys\nfrom mimo_train.cli import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout or "error: " in result.stderr


@pytest.mark.parametrize("path", sources(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{path.relative_to(ROOT)} has {lines} lines: split it by concern"
