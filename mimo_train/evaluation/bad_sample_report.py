"""Tells people of bad samples: each once, on the logging rank, and in a file of the run."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.pipeline import BadSample, BadSamples
from data.text_format import shown

_logger = logging.getLogger(__name__)

FILE = "bad_samples.jsonl"
"""In `run.dir`: a JSON object a line, `shard`, `key`, `reason`, `part` (`train` or `held_out`), `number` and `source`
(empty without a mixture)."""

NAMED = 5
"""Bad samples of one report that are named on the console; the rest is counted."""


class BadSampleReport:
    """Gathers what ranks have found."""

    def __init__(self, run_dir: Path, logging_rank: int, message: Callable[[str], None]):
        """
        Args:
            message: writes a line to the console.
        """
        self._file, self._logging_rank, self._message = run_dir / FILE, logging_rank, message

    def adopt(self, found: BadSamples, part: str) -> None:
        """From now on tell of these, instead of each rank for itself.

        Args:
            part: `train` or `held_out`.
        """
        found.is_quiet = True

        def append(new: list[BadSample]) -> None:
            _append(self._file, new, part)

        found.on_excess = append

    def __call__(self, found: BadSamples, part: str) -> None:
        """Tell of those that are new since the last call. Collective over all ranks."""
        new = found.take()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, new)
        if dist.get_rank() != self._logging_rank:
            return
        written = _append(self._file, [bad for of_rank in of_ranks for bad in of_rank], part)
        for bad in written[:NAMED]:
            self._message(f"bad sample: {bad}")
        if len(written) > NAMED:
            self._message(f"{len(written) - NAMED} more bad samples, see {self._file}")


def _append(path: Path, bad_samples: Iterable[BadSample], part: str) -> list[BadSample]:
    """Add those to the file that are not in it, and give them back: of a sample that several ranks have found, the
    first."""
    new: list[BadSample] = []
    try:
        known = _known(path)
        for bad in bad_samples:
            if (str(bad.shard), bad.key) not in known:
                known.add((str(bad.shard), bad.key))
                new.append(bad)
        entries = [
            {"shard": str(bad.shard), "key": bad.key, "reason": shown(bad.reason), "part": part}
            | {"number": bad.number, "source": bad.source}
            for bad in new
        ]
        if entries:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries))
    except OSError as error:  # no run ends for it
        _logger.warning("%s cannot be written (%s): training goes on without it", path, error)
    return new


def _known(path: Path) -> set[tuple[str, str]]:
    """(shard, key) of the lines of the file."""
    found: set[tuple[str, str]] = set()
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    found.add((entry["shard"], entry["key"]))
                except (ValueError, KeyError, TypeError):
                    continue  # a line that was cut when a job was killed
    return found
