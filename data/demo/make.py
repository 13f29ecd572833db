"""Make the shards of the demos from data in scikit-learn: digits, digits and tones, or texts.

`demo.json` is written last, with the parameters and the sizes of all shards. Equal parameters give equal bytes.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.storage.files import replacing
from data.storage.write import write_shard

if TYPE_CHECKING:
    from data.demo.samples import DemoSample

MARKER = "demo.json"
_FORMAT = 1
_MARKER = re.compile(r"<(image|audio)>\n")
_QUESTIONS = {"train": 2, "held_out": 1}  # maximum about an image, in one conversation


def make_demo(
    out_dir: str | os.PathLike[str],
    *,
    train_samples: int = 12000,
    held_out_samples: int = 768,
    seed: int = 0,
    shards: int = 8,
    text_only_fraction: float = 0.1,
) -> Path:
    """Write the digits demo (see `samples.py`) into `out_dir` and return it. An earlier demo's shards are replaced.

    Args:
        shards: training shards; there is one held-out shard. Odd shards have chat `messages`, even ones LLaVA
            `conversations`.

    Raises:
        DataError: invalid numbers, no scikit-learn, or a folder with shards that are not a demo's.
    """
    parameters = {"train_samples": train_samples, "held_out_samples": held_out_samples, "seed": seed, "shards": shards}
    _require_sizes(parameters)
    if not 0 <= text_only_fraction <= 1:
        raise DataError(f"text_only_fraction is a share from 0 to 1, got {text_only_fraction}")
    from data.demo.samples import load_scans, make_sample

    with _writing(Path(out_dir), "digits", parameters | {"text_only_fraction": text_only_fraction}) as folder:
        for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
            digits, questions = load_scans(part == "held_out"), _QUESTIONS[part]
            _write_part(
                folder / part,
                samples,
                number,
                seed,
                lambda _, rng, digits=digits, questions=questions: make_sample(
                    digits, rng, text_only_fraction, questions
                ),
            )
    return Path(out_dir)


def make_mixed_demo(
    out_dir: str | os.PathLike[str],
    *,
    train_samples: int = 3000,
    held_out_samples: int = 320,
    seed: int = 0,
    shards: int = 4,
) -> Path:
    """Write the mixed demo (see `samples.py`). See `make_demo`."""
    parameters = {"train_samples": train_samples, "held_out_samples": held_out_samples, "seed": seed, "shards": shards}
    _require_sizes(parameters)
    from data.demo.samples import load_scans, make_mixed_sample

    with _writing(Path(out_dir), "mixed", parameters) as folder:
        for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
            _write_part(
                folder / part, samples, number, seed, partial(make_mixed_sample, load_scans(part == "held_out"))
            )
    return Path(out_dir)


def make_text_demo(out_dir: str | os.PathLike[str], *, shards: int = 1) -> Path:
    """Write the text demo: passages of scikit-learn's dataset descriptions; the last tenth of each is held out."""
    _require_sizes({"shards": shards})
    with _writing(Path(out_dir), "text", {"shards": shards}) as folder:
        train, held_out = _passages()
        for number in range(shards):
            part = train[number::shards]
            write_shard(folder / "train" / f"train-{number:06d}.tar", ([("txt", text.encode())] for text in part))
        write_shard(folder / "held_out" / "held_out-000000.tar", ([("txt", text.encode())] for text in held_out))
    return Path(out_dir)


def ensure_demo(out_dir: str | os.PathLike[str], kind: str = "digits", **parameters: Any) -> Path:
    """Make the demo of a kind of `DEMOS` unless `out_dir` already has it; return `out_dir`.

    Every rank may call it: one makes the demo, the others wait.

    Raises:
        DataError: the folder has a demo with other parameters, or shards that are not a demo's.
    """
    if kind not in DEMOS:
        raise DataError(f"unknown demo {kind!r}; known are {', '.join(DEMOS)}")
    make, out_dir = DEMOS[kind], Path(out_dir)
    wanted = {name: given.default for name, given in signature(make).parameters.items() if name != "out_dir"}
    wanted |= parameters
    if _complete(out_dir, kind, wanted):
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(out_dir.parent / f".{out_dir.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes or the process dies
        for left in out_dir.parent.glob(f"{glob.escape(_temporary_prefix(out_dir))}*"):  # from a killed process
            shutil.rmtree(left, ignore_errors=True)
        if not _complete(out_dir, kind, wanted):
            make(out_dir, **parameters)
    return out_dir


DEMOS: dict[str, Callable[..., Path]] = {"digits": make_demo, "mixed": make_mixed_demo, "text": make_text_demo}


def _require_sizes(parameters: dict[str, int]) -> None:
    sizes = {name: value for name, value in parameters.items() if name != "seed"}
    if min(sizes.values()) < 1:
        got = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise DataError(f"a demo needs at least one shard, and one sample of each part; got {got}")


def _complete(out_dir: Path, kind: str, parameters: dict[str, Any]) -> bool:
    try:
        marker = json.loads((out_dir / MARKER).read_text())
        if marker["format"] != _FORMAT or any(
            (out_dir / name).stat().st_size != size for name, size in marker["files"].items()
        ):
            return False
        found = {"kind": marker["kind"], **marker["parameters"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    wanted = {"kind": kind, **parameters}
    if found != wanted:
        differing = [
            f"{name}={found.get(name)} (wanted {value})" for name, value in wanted.items() if found.get(name) != value
        ]
        raise DataError(f"{out_dir} holds a demo made with {', '.join(differing)}: remove it or choose another folder")
    return True


@contextmanager
def _writing(out_dir: Path, kind: str, parameters: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder. Its shards move into `out_dir` when all are complete; the marker is written last."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=_temporary_prefix(out_dir), dir=out_dir.parent))
    try:
        yield scratch
        files = sorted(scratch.rglob("*.tar"))
        names = [file.relative_to(scratch) for file in files]
        _require_demo_shards(out_dir, scratch, {out_dir / name.parent for name in names})
        (out_dir / MARKER).unlink(missing_ok=True)
        marker = {"format": _FORMAT, "kind": kind, "parameters": parameters}
        marker["files"] = {str(name): file.stat().st_size for name, file in zip(names, files, strict=True)}
        for name in names:
            (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        for folder in {(out_dir / name).parent for name in names}:
            for old in folder.glob("*.tar"):  # from an earlier demo with more shards
                if old.relative_to(out_dir) not in names:
                    old.unlink()
        for name, file in zip(names, files, strict=True):
            os.replace(file, out_dir / name)
        with replacing(out_dir / MARKER) as marker_file:
            marker_file.write(json.dumps(marker, indent=1).encode() + b"\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _temporary_prefix(out_dir: Path) -> str:
    return f".{out_dir.name}.making-"


def _require_demo_shards(out_dir: Path, scratch: Path, folders: set[Path]) -> None:
    """Raise DataError if a shard in `folders` is not a demo's. It must be in the marker, or be the start of a new
    shard: a process that is killed while moving leaves no marker."""
    try:
        known = dict(json.loads((out_dir / MARKER).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    for folder in sorted(folders):
        for shard in sorted(folder.glob("*.tar")):
            name = shard.relative_to(out_dir)
            if known.get(str(name)) != shard.stat().st_size and not _is_start_of(shard, scratch / name):
                raise DataError(
                    f"a demo in {out_dir} would remove {shard}, which is no shard of a demo made there: choose another "
                    "folder, or move that shard"
                )


def _is_start_of(part: Path, whole: Path) -> bool:
    if not whole.is_file() or part.stat().st_size > whole.stat().st_size:
        return False
    with open(part, "rb") as first, open(whole, "rb") as second:
        while block := first.read(1 << 20):
            if block != second.read(len(block)):
                return False
    return True


def _write_part(folder: Path, samples: int, shards: int, seed: int, sample_of: Callable[..., DemoSample]) -> None:
    """Write shards of `samples` samples. `sample_of`: (number, random generator) -> sample."""
    import numpy as np

    held_out = folder.name == "held_out"
    for shard in range(shards):
        share = range(samples * shard // shards, samples * (shard + 1) // shards)

        def members(shard: int = shard, share: range = share) -> Iterator[list[tuple[str, bytes]]]:
            for number in share:
                # A generator per sample, so that samples do not depend on the number of shards.
                rng = np.random.default_rng([abs(seed), int(seed < 0), int(held_out), number])
                sample = sample_of(number, rng)
                record = _messages(sample.turns) if shard % 2 else _conversations(sample.turns)
                record["sources"] = sample.sources
                yield [*sample.members, ("json", json.dumps(record).encode())]

        write_shard(folder / f"{folder.name}-{shard:06d}.tar", members())


def _conversations(turns: list[tuple[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}


def _messages(turns: list[tuple[str, str]]) -> dict[str, Any]:
    messages = []
    for role, text in turns:
        *markers, rest = _MARKER.split(text)
        parts: list[dict[str, str]] = []
        for kind in markers[1::2]:
            parts += [{"type": kind}, {"type": "text", "text": "\n"}]
        messages.append({"role": role, "content": [*parts, {"type": "text", "text": rest}] if parts else text})
    return {"messages": messages}


def _passages() -> tuple[list[str], list[str]]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError("the text demo takes its prose from scikit-learn: pip install mimo-train[demo]") from error
    train: list[str] = []
    held_out: list[str] = []
    for name in ("iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud"):
        words = getattr(datasets, f"load_{name}")().DESCR.split()
        passages, current = [], ""
        for word in words:
            current = f"{current} {word}" if current else word
            if len(current) >= 180 or (len(current) >= 100 and word.endswith((".", ":", "?"))):
                passages.append(current)
                current = ""
        cut = len(passages) - max(len(passages) // 10, 1)
        train += passages[:cut]
        held_out += passages[cut:]
    return train, held_out
