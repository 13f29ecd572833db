"""Make the shards of the demos from data in scikit-learn: digits in images or videos, preferences, tones, or texts.

A demo is written into a temporary folder, which is renamed when it is complete. Equal parameters give equal bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.storage.files import file_lock
from data.storage.tar import write_shard

if TYPE_CHECKING:
    from data.demo.samples import DemoSample

MARKER = "demo.json"
"""File with the kind and the parameters of a demo."""
_MARKER = re.compile(r"<(image|audio|video)>\n")
_QUESTIONS = {"train": 2, "held_out": 1}  # maximum about an image, in one conversation


def make_demo(out_dir: str | os.PathLike[str], kind: str = "digits", **parameters: Any) -> Path:
    """Make the demo of a kind of `DEMOS` unless `out_dir` already has it; return `out_dir`.

    Every rank may call it: one makes the demo, the others wait.

    Args:
        parameters: see the function of the kind.

    Raises:
        DataError: the kind or a number is invalid, scikit-learn is not installed, or the folder has a demo with other
            parameters, or other files.
    """
    if kind not in DEMOS:
        raise DataError(f"unknown demo {kind!r}; known are {', '.join(DEMOS)}")
    write, out_dir = DEMOS[kind], Path(out_dir).resolve()
    wanted = {name: parameter.default for name, parameter in signature(write).parameters.items() if name != "folder"}
    wanted |= parameters
    sizes = {name: value for name, value in wanted.items() if name in ("train_samples", "held_out_samples", "shards")}
    if min(sizes.values()) < 1:
        got = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise DataError(f"a demo needs at least one shard, and one sample of each part; got {got}")
    if not 0 <= wanted.get("text_only_fraction", 0) <= 1:
        raise DataError(f"text_only_fraction is a share from 0 to 1, got {wanted['text_only_fraction']}")
    recorded = {"kind": kind, "parameters": wanted}
    if _is_made(out_dir, recorded):
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(out_dir.parent / f".{out_dir.name}.lock"):
        if not _is_made(out_dir, recorded):
            folder = out_dir.parent / f".{out_dir.name}.making"
            shutil.rmtree(folder, ignore_errors=True)  # of a killed process
            try:
                write(folder, **parameters)
                (folder / MARKER).write_text(json.dumps(recorded, indent=1) + "\n")
                folder.rename(out_dir)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return out_dir


def _is_made(out_dir: Path, recorded: dict[str, Any]) -> bool:
    if not out_dir.exists() or not os.listdir(out_dir):
        return False
    try:
        marker = json.loads((out_dir / MARKER).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{out_dir} is not empty and holds no demo. Choose another folder") from error
    before, now = ({"kind": item.get("kind")} | item.get("parameters", {}) for item in (marker, recorded))
    if before != now:
        changed = [f"{name}={before.get(name)} (wanted {now[name]})" for name in now if before.get(name) != now[name]]
        raise DataError(f"{out_dir} holds a demo made with {', '.join(changed)}. Remove it or choose another folder")
    shards = [len([*(out_dir / part).glob("*.tar")]) for part in ("train", "held_out")]
    if shards != [now["shards"], 1]:
        raise DataError(
            f"{out_dir} has {shards} training and held-out shards, expected {[now['shards'], 1]}. Remove it"
        )
    return True


def _write_digits(
    folder: Path,
    *,
    train_samples: int = 12000,
    held_out_samples: int = 768,
    seed: int = 0,
    shards: int = 8,
    text_only_fraction: float = 0.1,
) -> None:
    """Write the digits demo (see `samples.py`).

    Args:
        shards: training shards; there is one held-out shard. Odd shards have chat `messages`, even ones LLaVA
            `conversations`.
    """
    from data.demo.samples import load_scans, make_sample

    for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
        digits, questions = load_scans(part == "held_out"), _QUESTIONS[part]

        def sample_of(_: int, rng: Any, digits: Any = digits, questions: int = questions) -> DemoSample:
            return make_sample(digits, rng, text_only_fraction, questions)

        _write_part(folder / part, samples, number, seed, sample_of)


def _write_mixed(
    folder: Path, *, train_samples: int = 3000, held_out_samples: int = 320, seed: int = 0, shards: int = 4
) -> None:
    """Write the mixed demo (see `samples.py`). See `_write_digits`."""
    from data.demo.samples import load_scans, make_mixed_sample

    for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
        _write_part(folder / part, samples, number, seed, partial(make_mixed_sample, load_scans(part == "held_out")))


def _write_text(folder: Path, *, shards: int = 1) -> None:
    """Write the text demo: passages of scikit-learn's dataset descriptions; the last tenth of each is held out."""
    train, held_out = _passages()
    for number in range(shards):
        part = train[number::shards]
        write_shard(folder / "train" / f"train-{number:06d}.tar", ([("txt", text.encode())] for text in part))
    write_shard(folder / "held_out" / "held_out-000000.tar", ([("txt", text.encode())] for text in held_out))


def _write_pairs(
    folder: Path,
    *,
    train_samples: int = 4800,
    held_out_samples: int = 768,
    seed: int = 0,
    shards: int = 4,
    text_only_fraction: float = 0.1,
) -> None:
    """Write right and wrong answers about digits, as pairs of preferences. See `_write_digits`."""
    from data.demo.samples import load_scans, make_pair

    for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
        digits = load_scans(part == "held_out")

        def sample_of(_: int, rng: Any, digits: Any = digits) -> DemoSample:
            return make_pair(digits, rng, text_only_fraction)

        _write_part(folder / part, samples, number, seed, sample_of)


def _write_videos(
    folder: Path, *, train_samples: int = 4000, held_out_samples: int = 512, seed: int = 0, shards: int = 4
) -> None:
    """Write the video demo (see `videos.py`). See `_write_digits`."""
    from data.demo.samples import load_scans
    from data.demo.videos import make_video_sample

    for part, samples, number in (("train", train_samples, shards), ("held_out", held_out_samples, 1)):
        digits, questions = load_scans(part == "held_out"), _QUESTIONS[part]

        def sample_of(_: int, rng: Any, digits: Any = digits, questions: int = questions) -> DemoSample:
            return make_video_sample(digits, rng, questions)

        _write_part(folder / part, samples, number, seed, sample_of)


DEMOS: dict[str, Callable[..., None]] = {
    "digits": _write_digits,
    "digits_pairs": _write_pairs,
    "mixed": _write_mixed,
    "text": _write_text,
    "video_digits": _write_videos,
}


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
                if sample.rejected:
                    *prompt, (_, chosen) = sample.turns
                    record = {"prompt": _messages(prompt)["messages"], "chosen": chosen, "rejected": sample.rejected}
                else:
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
