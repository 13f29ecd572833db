"""`mimo-train checkpoint list|show|verify PATH`: what checkpoints hold and whether they are whole."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.storage.url import Place, Url, place_of
from data.text_format import plural, shown
from mimo_train.commands.arguments import positive

if TYPE_CHECKING:
    from mimo_train.checkpoint.inspection import Found, Tensor

PATH_HELP = "folder or URL of a run, its `checkpoints`, or one checkpoint"


def add(subparsers: Any) -> None:
    """Add the command and its own commands."""
    checkpoint = subparsers.add_parser("checkpoint", help="list, show and verify checkpoints")
    commands = checkpoint.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    for name, handler, summary in (
        (
            "list",
            _list,
            "list checkpoints with step, size, layout; exit code 1 if one is visibly damaged",
        ),
        ("show", _show, "show what is in one checkpoint, by default a run's newest: modules and tensors"),
        ("verify", _verify, "read all of every checkpoint and compare hashes; exit code 1 if one is damaged"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("path", metavar="PATH", help=PATH_HELP)
        command.add_argument("--json", action="store_true", help="write JSON")
        command.set_defaults(handler=handler)
        if name == "show":
            command.add_argument(
                "--tensors", metavar="PATTERN", action="append", default=[],
                help="only tensors whose `module.name` fits this shell pattern; may be given several times",
            )  # fmt: skip
        if name == "verify":
            command.add_argument("--workers", type=positive, default=4, help="threads (default: 4)")


def _list(args: argparse.Namespace) -> int:
    from mimo_train.checkpoint import inspection

    descriptions = inspection.look(place_of(args.path))
    if args.json:
        _print_json([_plain(description) for description in descriptions])
    else:
        rows = [("step", "kind", "saved", "files", "size", "layout", "folder")]
        rows += [
            (
                _step(description),
                description.kind,
                _when(description),
                str(description.files),
                _size(description.nbytes),
                _layout(description),
                description.path.name,
            )
            for description in descriptions
        ]
        _print_table(rows)
    return _complain(
        [
            (description.path, description.damage)
            for description in descriptions
            if description.damage and description.kind in inspection.CONTINUED
        ]
    )


def _show(args: argparse.Namespace) -> int:
    from mimo_train.checkpoint import inspection
    from mimo_train.checkpoint.format.files import Damage
    from mimo_train.checkpoint.format.read import Reader
    from mimo_train.config.errors import UserError

    continued = inspection.look(place_of(args.path))
    if len(continued) > 1:
        continued = [entry for entry in continued if entry.kind in inspection.CONTINUED]
    if not continued:
        raise UserError(f"PATH: no complete checkpoint in {args.path}")
    entry = continued[-1]
    try:
        index = Reader(entry.path).index
    except (Damage, OSError) as error:
        return _complain([(entry.path, entry.damage or str(error))])
    tensors = inspection.tensors(index, args.tensors)
    if args.tensors and not tensors:
        raise UserError(f"--tensors: {', '.join(args.tensors)} fits no tensor of {entry.path}")
    if args.json:
        _print_json({**_plain(entry), "tensors": [_plain(tensor) for tensor in tensors]})
    else:
        print(
            f"{entry.path}\nstep {_step(entry)}, {entry.kind}, saved {_when(entry)}, {plural(entry.files, 'file')}, "
            f"{_size(entry.nbytes)}"
        )
        print(f"layout: {_layout(entry)}\n")
        _print_modules(tensors)
        print()
        rows = [("tensor", "shape", "type", "size", "files", "states")]
        rows += [
            (
                f"{tensor.module}.{tensor.name}",
                "x".join(map(str, tensor.shape)) or "one number",
                tensor.dtype,
                _size(tensor.nbytes),
                str(tensor.files),
                " ".join(tensor.states),
            )
            for tensor in tensors
        ]
        _print_table(rows)
    return _complain([(entry.path, entry.damage)] if entry.damage else [])


def _verify(args: argparse.Namespace) -> int:
    from mimo_train.checkpoint import inspection
    from mimo_train.config.errors import UserError

    paths = inspection.folders_at(place_of(args.path))
    if len(paths) > 1:
        paths = [path for path in paths if inspection.kind_of(path) in inspection.CONTINUED]
    if not paths:
        raise UserError(f"PATH: no complete checkpoint in {args.path}")
    results, start = [], time.monotonic()
    for path in paths:
        result = inspection.verify(path, args.workers)
        results.append(result)
        if not args.json:
            state = "damaged" if result.damage else "whole"
            print(
                f"{path}: {state}, {plural(result.files, 'file')}, {_size(result.nbytes)} in "
                f"{plural(result.blocks, 'block')}",
                flush=True,
            )
    if args.json:
        _print_json([_plain(result) for result in results])
    else:
        seconds = time.monotonic() - start
        damaged = sum(bool(result.damage) for result in results)
        print(
            f"{plural(len(results), 'checkpoint')}, {damaged} damaged, "
            f"{_size(sum(result.nbytes for result in results))}, {seconds:.1f} s"
        )
    return _complain([(result.path, damage) for result in results for damage in result.damage])


def _print_modules(tensors: list[Tensor]) -> None:
    rows = [("module", "tensors", "numbers", "trained", "size")]
    for module in dict.fromkeys(tensor.module for tensor in tensors):
        of = [tensor for tensor in tensors if tensor.module == module]
        trained = sum(tensor.numel for tensor in of if tensor.states)
        numbers, size = sum(tensor.numel for tensor in of), _size(sum(tensor.nbytes for tensor in of))
        rows.append((module, str(len(of)), f"{numbers:,}", f"{trained:,}", size))
    _print_table(rows)


def _complain(damages: list[tuple[Place, str]]) -> int:
    """Names what is damaged, on standard error; returns the exit code."""
    for path, damage in damages:
        print(shown(f"error: checkpoint {path} is damaged: {damage}"), file=sys.stderr)
    return 1 if damages else 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _plain(value: Any) -> dict[str, Any]:
    return {
        key: str(getattr(value, key)) if isinstance(getattr(value, key), Path | Url) else item
        for key, item in dataclasses.asdict(value).items()
    }


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _step(folder: Found) -> str:
    return "?" if folder.step is None else str(folder.step)


def _when(folder: Found) -> str:
    return "never" if folder.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.saved_at))


def _layout(folder: Found) -> str:
    return ", ".join(f"{name} {sizes}" for name, sizes in folder.layout.items()) or "?"


def _size(nbytes: int) -> str:
    """With a unit of powers of 1000."""
    number = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # as three digits it is written as
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
