"""The best checkpoints of a run (`checkpoint.keep_best`), and the file `checkpoints/best` that names them.

The file is JSON: `{"metric": "eval/loss", "mode": "min", "best": [{"step": 800, "value": 0.31}, ...]}`, the best first.
Commands and keys that take a checkpoint accept its path: they read the first of these checkpoints that is complete.
"""

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from data.storage.files import replacing
from data.storage.url import Place, Url
from mimo_train.checkpoint.damage import unreadable
from mimo_train.checkpoint.format.files import Damage, patiently, read_file, write_file
from mimo_train.config.errors import UserError
from mimo_train.config.schema_selection import KeepBestConfig

FILE = "best"
_MOST_BYTES = 2**20
_LISTED = 100
"""Most steps in the file."""


def ranked(scores: Iterable[Sequence[float]], mode: str) -> list[tuple[int, float]]:
    """Return (step, value), the best first: the earlier step at equal values, and none that is not finite.

    Args:
        scores: [step, value] of evaluations; of several of one step the last counts.
        mode: `min` or `max`.
    """
    values = {int(step): float(value) for step, value in scores if math.isfinite(value)}
    sign = 1 if mode == "min" else -1
    return sorted(values.items(), key=lambda item: (sign * item[1], item[0]))


def write(checkpoints: Place, watch: KeepBestConfig, best: Sequence[tuple[int, float]]) -> None:
    """Replace the file in the folder of a run's checkpoints. Raises OSError."""
    entries = [{"step": step, "value": value} for step, value in best[:_LISTED]]
    text = json.dumps({"metric": watch.metric, "mode": watch.mode, "best": entries}, indent=1).encode()
    if isinstance(checkpoints, Url):
        write_file(checkpoints / FILE, [text])
        return
    checkpoints.mkdir(parents=True, exist_ok=True)
    with replacing(checkpoints / FILE) as file:
        file.write(text)


def is_best(path: Place) -> bool:
    """True for the path of the file, `RUN/checkpoints/best`."""
    return path.name == FILE and path.parent.name == "checkpoints"


def steps_in(path: Place, key: str) -> list[int]:
    """Return the steps in the file, the best first.

    Raises:
        UserError: there is no such file, or it cannot be read; with `key`.
    """
    try:
        text = patiently(partial(read_file, path, at_most=_MOST_BYTES), path)
        return [int(entry["step"]) for entry in json.loads(text)["best"]]
    except OSError as error:
        raise unreadable(path, error) from error
    except Damage as error:
        if isinstance(path, Path) and path.exists():
            raise UserError(f"{key}: {path}: {error}") from error
        raise UserError(
            f"{key}: there is no {path}: only a run with checkpoint.keep_best writes it, at its evaluations"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{key}: {path} does not name checkpoints ({error!r}). Name one by its folder") from error
