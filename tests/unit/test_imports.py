"""Imports point one way, what must stay light imports no torch, and files stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mimo_train", "encoders", "data")
LONGEST_FILE = 400  # lines

LEVELS = (
    {"llm_spec", "config_frozen", "config_log"},
    {"config", "launch"},
    {"llm_faults", "bridge_faults", "batch_size", "placement"},
    {"compose", "layout", "device"},
    {"groups", "bridge", "memory", "samples", "step_sum", "feature_cache", "processes"},
    {"model", "checkpoint", "metrics"},
    {"optim", "pipeline", "check"},
    {"training"},
    {"cli"},
)
"""The parts of mimo_train, lowest first: a part imports itself and the parts of lower levels."""

LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}

LIGHT = (
    "mimo_train.config",
    "mimo_train.compose",
    "mimo_train.layout",
    "mimo_train.processes",
    "mimo_train.memory",
    "mimo_train.samples",
    "mimo_train.check",
    "mimo_train.launch",
    "mimo_train.cli",
    "encoders.spec",
    "encoders.registry",
)


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
                part, target = inner[0], rest[0] if rest else ""
                if part not in LEVEL:
                    wrong.append(f"{where}: {part} has no level; give it one in {Path(__file__).name}")
                elif target in LEVEL and target != part and LEVEL[target] >= LEVEL[part]:
                    wrong.append(f"{where}: {target} is not below {part}")
    return wrong


def test_arrows_point_one_way():
    assert not wrong_arrows(ROOT)


def test_each_part_has_a_level():
    parts = {path.relative_to(ROOT / "mimo_train").parts[0] for path in (ROOT / "mimo_train").rglob("*.py")}
    assert {part.removesuffix(".py") for part in parts} - {"__init__"} <= LEVEL.keys()


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("mimo_train/groups.py", "from mimo_train.training import loop", "training is not below groups"),
        ("mimo_train/groups.py", "from .training import loop", "training is not below groups"),
        ("mimo_train/groups.py", "from mimo_train import training", "training is not below groups"),
        ("mimo_train/model/vit.py", "from ..pipeline import Pipeline", "pipeline is not below model"),
        ("mimo_train/model/vit.py", "def f():\n    import mimo_train.optim.adam", "optim is not below model"),
        ("mimo_train/layout.py", "from mimo_train.device import x", "device is not below layout"),
        ("mimo_train/novelty.py", "from mimo_train.config import x", "novelty has no level"),
        ("encoders/vit.py", "import mimo_train.config", "encoders imports neither"),
        ("encoders/vit.py", "import data", "encoders imports neither"),
        ("data/read.py", "from encoders.spec import num_tokens", "data imports neither"),
        ("mimo_train/training/loop.py", "from mimo_train.model import build\nfrom .state import S\nimport data", ""),
        ("mimo_train/cli.py", "from data.cli import main\nfrom mimo_train import layout", ""),
        ("encoders/vit.py", "from encoders.spec import x\nfrom . import y\nimport torch", ""),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path, file, line, complaint):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    found = wrong_arrows(tmp_path)
    assert (len(found) == 1 and complaint in found[0]) if complaint else not found, found


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_light_modules_import_no_torch():
    result = python(
        f"import importlib, sys\nfor name in {LIGHT}:\n    importlib.import_module(name)\n"
        "    heavy = {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["world", "vlm_digits"], ["world", "vlm_digits", "x=1"]]
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
