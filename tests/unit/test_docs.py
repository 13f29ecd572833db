"""What the documents name exists: paths, config keys, Python names, commands."""

import ast
import dataclasses
import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from mimo_train import cli
from mimo_train.config.compose import load
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import (
    FeatureCacheConfig,
    LayoutConfig,
    LoraConfig,
    ModuleConfig,
)
from mimo_train.config.schema_optim import GroupConfig, ModuleOptimConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.layout.run import resolve
from mimo_train.preflight.check import check

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SECTIONS = {
    field.name: type(getattr(ConfigContainer(), field.name))
    for field in dataclasses.fields(ConfigContainer)
    if field.name != "modules"
}
MODULE_PARTS = {
    "layout": [LayoutConfig],
    "lora": [LoraConfig],
    "feature_cache": [FeatureCacheConfig],
    "optim": [ModuleOptimConfig, GroupConfig],
    "llm": [LlmSpec, TransformersLlm],
    "projector": [ProjectorSpec],
    "encoder": [family.spec for family in FAMILIES.values()],
}


PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.|X{4}|\*\*|^my\b|~")
"""What stands for a name that the reader chooses."""
OF_OTHERS = {"config.yaml", "data.py", "layout/four_and_two.yaml", "encoder/vit_mine.yaml"}
OF_OTHERS |= {"split.yaml", "dataset.yaml", ".info.yaml", "tools/preprocess_data.py", "preprocess_data.py"}
"""Files that a run or another program writes, or that belong to the reader."""
SUFFIXES = (".py", ".sh", ".md", ".yaml", ".toml", ".sbatch")
FOLDERS = ("mimo_train", "encoders", "data", "configs", "scripts", "tests", "docs", "benchmarks", ".ci")


@cache
def files() -> frozenset[str]:
    """Paths of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    return frozenset(listed) or frozenset(
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
    )


def paths_that_do_not_exist(quoted: str) -> list[str]:
    wrong = []
    for word in quoted.split():
        word = word.partition("::")[0]
        if PLACEHOLDER.search(word) or not re.fullmatch(r"[\w./-]+", word) or word in OF_OTHERS:
            continue
        if word.endswith(SUFFIXES):
            if not any(file == word or file.endswith(f"/{word}") for file in files()):
                wrong.append(word)
        elif word.count("/") and word.split("/")[0] in FOLDERS and not (ROOT / word).exists():
            # A group such as data/ in configs/ may have the name of a folder.
            wrong += [word] if not (ROOT / "configs" / word).exists() else []
    return wrong


def definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines or imports, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def is_python_name(dotted: str) -> bool:
    """Whether `mimo_train.training.step.state.GlobalState.cfg` and the like exist, by reading the files."""
    place, parts = ROOT, dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        source = place / f"{parts.pop(0)}.py"
    elif (place / "__init__.py").is_file():
        source = place / "__init__.py"
    else:
        return False
    node: ast.AST = ast.parse(source.read_text())
    for part in parts:
        if not isinstance(node, ast.Module | ast.ClassDef):
            return False
        found = definitions(node.body).get(part)
        if found is None:
            return False
        node = found
    return True


def is_config_key(dotted: str) -> bool:
    """Whether a key such as train.iters or modules.images.layout.tp exists; a section alone counts."""
    section, *rest = dotted.split(".")
    if section != "modules":
        return not rest or rest[0] in {field.name for field in dataclasses.fields(SECTIONS[section])}
    if len(rest) < 2:
        return True
    part = rest[1]
    if part not in {field.name for field in dataclasses.fields(ModuleConfig)}:
        return False
    kinds = MODULE_PARTS.get(part)
    return (
        len(rest) == 2 or not kinds or rest[2] in {field.name for kind in kinds for field in dataclasses.fields(kind)}
    )


def names_that_do_not_exist(quoted: str) -> list[str]:
    """Dotted names in a quotation that are neither keys of the config nor Python names."""
    wrong = []
    for word in re.findall(r"(?<![\w./@{-])[a-z_]+(?:\.\w+)+(?![\w/-])", quoted):
        first = word.split(".")[0]
        if word.endswith((*SUFFIXES, ".json", ".jsonl", ".txt", ".html", ".tar")) or word in OF_OTHERS:
            continue
        if PLACEHOLDER.search(word.replace("NAME", "name")):
            continue
        if first in ("mimo_train", "encoders"):
            wrong += [] if is_python_name(word) else [word]
        elif first == "modules" or first in SECTIONS:
            wrong += [] if is_config_key(word) or is_python_name(word) else [word]
    return wrong


@cache
def words_of_the_code() -> frozenset[str]:
    sources = [ROOT / file for file in files() if file.endswith((".py", ".toml", ".sh", ".yaml"))]
    texts = [source.read_text() for source in sources if source != Path(__file__)]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def unknown_identifiers(quoted: str) -> list[str]:
    """Names in mixed case, such as `GlobalState`, that no file of the code has; not shape suffixes as in `rows_SBH`."""
    if re.search(r"_[A-Z]+$", quoted):
        return []
    bare = re.fullmatch(r"[A-Za-z_]\w*[a-z]\w*[A-Z]\w*(?:\(\))?", quoted)
    return [quoted] if bare and quoted.removesuffix("()") not in words_of_the_code() else []


def unknown_commands(text: str) -> list[str]:
    known = {module.__name__.rpartition(".")[2] for module in cli.command_modules()} | {"world"}
    return [name for name in re.findall(r"(?<![\w'.-])mimo-train ([a-z][a-z-]*)(?= )", text) if name not in known]


def complaints(text: str) -> list[str]:
    """What a document names in quotations and links that does not exist."""
    wrong = []
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        wrong += paths_that_do_not_exist(quoted) + names_that_do_not_exist(quoted) + unknown_identifiers(quoted)
        if quoted.startswith("mimo-train "):
            wrong += unknown_commands(quoted + " ")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document):
    assert not complaints(document.read_text())


@cache
def anchors(document: Path) -> frozenset[str]:
    """Anchors of the headings of a document."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for file, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", document.read_text()):
        if not file.startswith(("http://", "https://")):
            target = document.parent / file if file else document
            assert target.exists(), file
            assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


RUN = re.compile(r"(scripts/train_\w+\.sh|mimo-train (?:check|config|world)|\w+\.sbatch) +[^#>|]+")


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), flags=re.S | re.M)


def shown_runs() -> list[str]:
    """Config and overrides of every run in a block of shell commands whose config is a shipped one."""
    texts = [block.replace("\\\n", " ") for document in DOCUMENTS for block in blocks(document, "bash")]
    runs = [found[0] for text in texts for line in text.splitlines() if (found := RUN.search(line))]
    words = [run.removeprefix("mimo-train ").split(maxsplit=1)[1:] for run in runs]
    return sorted({rest[0].strip() for rest in words if rest and not re.search(r"my\.yaml|CONFIG", rest[0])})


@pytest.mark.parametrize("run", shown_runs())
def test_a_run_that_a_document_shows_has_no_faults(run, tmp_path):
    for name, kind in {"language": "qwen2", "images": "clip", "audio": "whisper", "all": "llava"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
        image = [{"id": 32000, "content": "<image>"}]
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"added_tokens": image}))
    placed = re.sub(r"modules\.(\w+)\.pretrained=(?:/models|\w+)/\S+", rf"modules.\1.pretrained={tmp_path}/\1", run)
    config, *overrides = shlex.split(re.sub(r"(?<=\s)pretrained=/models/\S+", f"pretrained={tmp_path}/all", placed))
    options = [word for word in overrides if word.startswith("--")]
    cfg = load(config, [word for word in overrides if word not in options])
    if options:
        assert options == ["--without-data"] and not check(cfg, without_data=True).faults
        return
    resolve(cfg)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_shown_program_imports_exists(document):
    nodes = [node for block in blocks(document, "python") for node in ast.walk(ast.parse(block))]
    names = [
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert not [name for name in names if name.split(".")[0] in FOLDERS and not is_python_name(name)]


def test_every_event_of_a_callback_is_described_with_its_arguments():
    (callback,) = [
        node
        for node in ast.parse((ROOT / "mimo_train/training/callbacks.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Callback"
    ]
    events = [node for node in callback.body if isinstance(node, ast.FunctionDef) and node.name.startswith("on_")]
    text = (DOCS / "callbacks.md").read_text()
    shown = [f"`{event.name}({', '.join(argument.arg for argument in event.args.args[1:])})`" for event in events]
    assert len(shown) > 5 and not [event for event in shown if event not in text]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see `mimo_train/plan/none.py`", "mimo_train/plan/none.py"),
        ("see `tests/dist/test_none.py::test_x`", "tests/dist/test_none.py"),
        ("see `mimo_train/none/`", "mimo_train/none/"),
        ("set `train.itres=5`", "train.itres"),
        ("set `modules.NAME.layout.tpp`", "modules.NAME.layout.tpp"),
        ("call `mimo_train.layout.run.resolved`", "mimo_train.layout.run.resolved"),
        ("a `NoSuchThing` does it", "NoSuchThing"),
        ("run `mimo-train chekc CONFIG`", "chekc"),
        ("`mimo_train/layout/run.py`, `data.errors.DataError`, `modules.images.layout.tp=2`, `GlobalState`", None),
        ("`mimo-train check CONFIG`, `encoders/NAME/spec.py`, `spec.py`, `step/state.py`", None),
    ],
)
def test_a_name_that_does_not_exist_is_found(text, complaint):
    assert complaints(text) == ([complaint] if complaint else [])


def test_the_promises_name_tests_that_are_there():
    table = (DOCS / "reliability.md").read_text().partition("## Promises")[2].partition("Not promised")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        tests = re.findall(r"`([\w/.]*\.py)`", row.split(" | ")[1])
        assert tests and not [test for test in tests if paths_that_do_not_exist(test)], row


def test_every_record_and_every_script_that_measures_is_listed():
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    there = {path.name for kind in ("*.md", "*.py") for path in (ROOT / "benchmarks").glob(kind)} - {"README.md"}
    assert there and not [name for name in sorted(there) if name not in listed]
