"""Write the tables of docs/configuration.md from the dataclasses of the config and the files of configs/.

    python scripts/key_tables.py           # exit code 1 if the page is not current
    python scripts/key_tables.py --write   # make it current

For developers: no command of mimo-train needs it. The meaning of a key is the docstring under its field; the meaning of
a shipped file is its first comment. Each part of the page is between `<!-- begin NAME -->` and `<!-- end NAME -->`; the
rest is written by hand.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

from encoders.native.vit.patch_spec import PatchSpec  # noqa: E402
from encoders.native.vit.tower import TowerSpec  # noqa: E402
from encoders.projectors.spec import ProjectorSpec  # noqa: E402
from encoders.registry import FAMILIES  # noqa: E402
from encoders.transformers_media.spec import MediaSpec, ProcessorSpec  # noqa: E402
from encoders.transformers_media.tower_spec import AutoTowerSpec  # noqa: E402
from mimo_train.config.compose import NO_GROUPS  # noqa: E402
from mimo_train.config.keys import rules_of  # noqa: E402
from mimo_train.config.llm_spec import LlmSpec  # noqa: E402
from mimo_train.config.schema import ConfigContainer  # noqa: E402
from mimo_train.config.schema_modules import ModuleConfig  # noqa: E402
from mimo_train.config.transformers_llm import TransformersLlm  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
CONFIGS = ROOT / "configs"

PLACES = {
    "encoder": "`modules.NAME.encoder`",
    "projector": "`modules.NAME.projector`",
    "llm": "`modules.language.llm`",
    "data": "`data`",
    "optim": "`optim`",
    "layout": "`placement`, and the `layout` of each module",
}
"""Where a pick of each group of configs/ goes, in the order of the page."""

SHARED: dict[type, str] = {
    PatchSpec: "vision encoders",
    TowerSpec: "published vision encoders",
    ProcessorSpec: "classes of transformers",
    MediaSpec: "media sides of transformers",
    AutoTowerSpec: "encoders of transformers",
}
"""Bases of several encoder families, whose keys the page lists once, with the headings of their tables."""

LARGE = 1000
"""Upper bounds from here on only catch typing errors: the page leaves them out."""

CITATION = re.compile(r" \([^()]*arXiv[^()]*\)")
"""Matches a source in the docstring of an encoder, which readers of the code need, not those of the page."""

HEAD = ("| key | default | meaning |", "|---|---|---|")

WRITE = "python scripts/key_tables.py --write"


class Undescribed(ValueError):
    """A field without a docstring, a file without a comment, a part of the page without markers."""


def parts() -> dict[str, str]:
    """Return the text between the markers, by their name."""
    fields = dataclasses.fields(ConfigContainer)
    sections = {
        field.name: "\n".join(_section(field.default_factory, field.name))
        for field in fields
        if field.name != "modules" and _is_group(field)
    }
    # Keys that belong to no section.
    sections |= {
        field.name: "\n".join([*_table(ConfigContainer, "", lambda other, name=field.name: other.name == name), ""])
        for field in fields
        if not _is_group(field) and field.name != "modules"
    }
    return {
        "runs": "\n".join(_files(CONFIGS, "run")),
        "groups": "\n".join(_groups()),
        "modules": "\n".join(_module()),
        "encoders": "\n".join(_encoders()),
        "projector": "\n".join(_section(ProjectorSpec)),
        "llm": "\n".join([*_section(LlmSpec), *_section(TransformersLlm)]),
        **sections,
    }


def current(page: str) -> str:
    """Return the text of the page with current parts.

    Raises:
        Undescribed: markers are missing or unknown, or a field or file is not described.
    """
    return filled(page, parts(), PAGE.name)


def filled(page: str, written: dict[str, str], file: str) -> str:
    """Return the text of a page with `written` between its markers.

    Args:
        written: parts by the names of their markers.
        file: name of the page, for errors.

    Raises:
        Undescribed: markers are missing or unknown.
    """
    marked = re.findall(r"<!-- begin (\S+) -->", page)
    if sorted(marked) != sorted(written):
        raise Undescribed(f"{file} needs markers for {sorted(written)}, once each, and has {sorted(marked)}")
    for name, text in written.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not closed:
            raise Undescribed(f"{file}: {begin} has no {end}")
        page = f"{before}{begin}\n\n{text}\n{end}{after}"
    return page


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, in one line. A field that overrides another one without a
    docstring has that of the other one.

    Raises:
        Undescribed: a field has none.
    """
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _docstrings_in(base, meanings)
    return meanings


def _docstrings_in(cls: type, inherited: dict[str, str]) -> dict[str, str]:
    tree = ast.parse(Path(inspect.getfile(cls)).read_text())
    keys = {field.name for field in dataclasses.fields(cls)}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    meanings = {}
    for field, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or field.target.id not in keys:
            continue  # a class variable is no key
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(text, str) and text.strip():
            meanings[field.target.id] = " ".join(text.split())
        elif field.target.id not in inherited:
            raise Undescribed(f"{cls.__name__}.{field.target.id} has no docstring under it, which is its meaning")
    return meanings


def described(file: Path) -> str:
    """Return the first comment of a YAML file, in one line.

    Raises:
        Undescribed: there is none.
    """
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    comment = []
    while lines and lines[0].startswith("#"):
        comment.append(lines.pop(0).lstrip("# ").rstrip())
    if not comment:
        raise Undescribed(f"{file.relative_to(ROOT)} does not begin with a comment that says what it is")
    return " ".join(comment)


def _section(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the docstring of a class, and the table of its keys."""
    yield from [_shown_text(inspect.getdoc(cls)), "", *_table(cls, prefix, lambda _: True), ""]


def _module() -> Iterator[str]:
    """Yield a table of a module's keys, then one for each group of them."""
    meanings, fields = docstrings(ModuleConfig), dataclasses.fields(ModuleConfig)
    groups = {field.name: field.default_factory for field in fields if _is_group(field)}
    yield from [*_table(ModuleConfig, "modules.NAME", lambda field: not _is_group(field)), ""]
    for name, cls in groups.items():
        prefix = f"modules.NAME.{name}"
        yield from [f"#### {prefix}", "", _shown_text(meanings[name]), "", *_table(cls, prefix, lambda _: True), ""]


def _encoders() -> Iterator[str]:
    """Yield the keys that encoder families share, then for each family what differs."""
    headings = dict(SHARED)
    for cls, heading in SHARED.items():
        yield from [f"#### {heading}", "", *_differences(cls, headings)]
    for name, family in FAMILIES.items():
        text = CITATION.sub("", _shown_text(inspect.getdoc(family.spec)))
        yield from [f"#### family: {name}", "", text, ""]
        yield from _differences(family.spec, headings)
        headings[family.spec] = f"family: {name}"


def _differences(cls: type, headings: dict[type, str]) -> Iterator[str]:
    """Yield how a class differs from its base in `headings`: defaults in a line, keys in a table."""
    base = next((other for other in cls.__mro__[1:] if other in headings), None)
    if base is None:
        yield from [*_table(cls, "", lambda field: cls in SHARED or field.name not in ("name", "family")), ""]
        return
    inherited = {field.name: field for field in dataclasses.fields(base)}
    meanings = docstrings(cls), docstrings(base)
    alike = {
        field.name: field
        for field in dataclasses.fields(cls)
        if field.name in inherited and meanings[0][field.name] == meanings[1][field.name]
    }
    # `name` and `family` are the heading itself.
    changed = [
        f"`{name}` {'its own' if name in ('pixel_mean', 'pixel_std') else _default(field)}"
        for name, field in alike.items()
        if name not in ("name", "family") and _default(field) != _default(inherited[name])
    ]
    heading = headings[base]
    anchor = re.sub(r"[^\w -]", "", heading).replace(" ", "-")
    defaults = f" Other defaults: {', '.join(changed)}." if changed else ""
    yield from [f"The keys of [{heading}](#{anchor}).{defaults}", ""]
    rows = [*_rows(cls, "", lambda field: field.name not in alike and field.name not in ("name", "family"))]
    if rows:
        yield from [*HEAD, *rows, ""]


def _is_group(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(field.default_factory)


def _table(cls: type, prefix: str, wanted: Callable[[dataclasses.Field], bool]) -> Iterator[str]:
    yield from [*HEAD, *_rows(cls, prefix, wanted)]


def _rows(cls: type, prefix: str, wanted: Callable[[dataclasses.Field], bool]) -> Iterator[str]:
    """Yield a row for each key, with full keys for groups inside."""
    meanings = docstrings(cls)
    for field in dataclasses.fields(cls):
        if not wanted(field):
            continue
        key = f"{prefix}.{field.name}" if prefix else field.name
        if _is_group(field):
            yield from _rows(field.default_factory, key, lambda _: True)
            continue
        item = next((kind for kind in get_args(field.type) if dataclasses.is_dataclass(kind)), None)
        if get_origin(field.type) in (dict, list) and item is not None:
            yield _row(key, field, meanings[field.name])
            each = f"{key}.NAME" if get_origin(field.type) is dict else f"{key}[N]"
            yield from _rows(item, each, lambda _: True)
            continue
        yield _row(key, field, meanings[field.name])


def _row(key: str, field: dataclasses.Field, meaning: str) -> str:
    """Return the row of a key, which is a link to the page that its docstring names."""
    text, _, link = meaning.partition(" See docs/")
    shown = f"[`{key}`]({link.rstrip('.').removeprefix(PAGE.name)})" if link else f"`{key}`"
    return f"| {shown} | {_default(field)} | {_shown_text(text + _bounds(field))} |"


def _bounds(field: dataclasses.Field) -> str:
    """Return the range of a number, without obvious bounds: at least 0 or 1, above 0, below 1, at most `LARGE`."""
    rules = rules_of(field)
    bounds = {
        "at least": rules.at_least if rules.at_least not in (0, 1) and abs(rules.at_least or 0) < LARGE else None,
        "above": rules.above or None,
        "below": rules.below if rules.below not in (None, 1) and rules.below < LARGE else None,
        "at most": rules.at_most if rules.at_most is not None and rules.at_most < LARGE else None,
    }
    words = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
    return f" {words.capitalize()}." if words else ""


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if value is None:
        return "unset"
    return "empty" if value == "" else f"`{_shown(value)}`"


def _shown(value: Any) -> str:
    """Return a value in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return re.sub(r"e([+-]?)0*(\d)", r"e\1\2", repr(value)) if isinstance(value, float) else str(value)


def _shown_text(text: str) -> str:
    """Return a docstring for a table, with links to the pages of docs/ that it names."""

    def link(match: re.Match) -> str:
        page, anchor = match[1], match[2] or ""
        words = anchor[1:].replace("-", " ") or page.removesuffix(".md")
        return f"[{words}]({page if page != PAGE.name else ''}{anchor})"

    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", link, " ".join(text.split())).replace("|", "\\|")


def _files(folder: Path, head: str) -> Iterator[str]:
    yield from [f"| {head} | what it is |", "|---|---|"]
    yield from (f"| `{file.stem}` | {_shown_text(described(file))} |" for file in sorted(folder.glob("*.yaml")))
    yield ""


def _groups() -> Iterator[str]:
    folders = {folder.name for folder in CONFIGS.iterdir() if folder.is_dir()} - NO_GROUPS
    if folders != PLACES.keys():
        raise Undescribed(f"PLACES of {Path(__file__).name} must name the groups {sorted(folders)} of configs/")
    yield from ["| group | goes to | files |", "|---|---|---|"]
    for group, place in PLACES.items():
        files = sorted((CONFIGS / group).glob("*.yaml"))
        all(map(described, files))
        yield f"| [`{group}`](../configs/{group}) | {place} | {', '.join(f'`{file.stem}`' for file in files)} |"
    yield ""


def main(arguments: list[str]) -> int:
    """Check the page, or write it; return the exit code."""
    return check_or_write(PAGE, current, WRITE, arguments)


def check_or_write(page: Path, current: Callable[[str], str], write: str, arguments: list[str]) -> int:
    """Compare a page with its current text, or write it; return the exit code.

    Args:
        current: returns the current text of the page from its old one.
        write: the command that writes it.
    """
    text = page.read_text()
    try:
        wanted = current(text)
    except Undescribed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "--write" in arguments:
        page.write_text(wanted)
    elif text != wanted:
        print(f"error: {page.relative_to(ROOT)} is not current: run `{write}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
