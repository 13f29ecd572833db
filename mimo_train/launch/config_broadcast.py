"""The config of a node's ranks: the first composes it, and hands it on in the launcher's folder. Imports no torch.

Files of a config, and the directories of `transformers` that it names, are often in storage that all nodes share, and a
thousand ranks that read them at once wait for each other.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mimo_train.config.compose import from_dict, to_dict
from mimo_train.config.schema import ConfigContainer
from mimo_train.launch.restarts import RESTART
from mimo_train.launch.temp_dir import SCRATCH

PATIENCE = 60.0
"""Seconds that a rank waits for the first one of its node; after them it composes the config itself."""
_FAILED = "failed"


def config_of_node(compose: Callable[[], ConfigContainer]) -> ConfigContainer:
    """The config that the first rank of this node composes; without our launcher, that of this rank.

    Raises:
        ConfigError: that of `compose`, on every rank.
    """
    folder = os.environ.get(SCRATCH)
    if folder is None or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return compose()
    file = Path(folder, f"config_{os.environ.get(RESTART, '0')}.json")
    if os.environ.get("LOCAL_RANK") != "0":
        plain = _awaited(file)
        return compose() if plain is None else from_dict(plain)
    try:
        cfg = compose()
    except BaseException:  # the others need not wait to find out why
        _hand_on(file, _FAILED)
        raise
    _hand_on(file, to_dict(cfg))
    return cfg


def _hand_on(file: Path, what: object) -> None:
    with suppress(OSError):  # the others compose it themselves
        new = file.with_suffix(".new")
        new.write_text(json.dumps(what))
        new.rename(file)


def _awaited(file: Path) -> dict | None:
    """What the first rank has handed on; None if that was nothing, so that this rank finds out by itself why."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            found = json.loads(file.read_text())
            return None if found == _FAILED else found
        time.sleep(0.05)
    return None
