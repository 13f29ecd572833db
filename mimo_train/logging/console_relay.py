"""The console of a run on several nodes: the first rank, on the first node, prints what the logging rank shows."""

import json
import queue
import threading
import time
from typing import Any

from mimo_train.logging.console import View

_KEY = "mimo_train/console"
_PAUSE = 0.2
"""Seconds between two looks at the store."""
_PATIENCE = 3.0
"""Seconds that the end of a console waits for what is still on its way."""


class SentView(View):
    """Sends what is shown to the first rank, from a thread: a store that does not answer holds up nobody. If it fails,
    nothing more is shown."""

    def __init__(self, store: Any):
        self._calls: queue.SimpleQueue[list | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, args=(store,), name="console", daemon=True)
        self._thread.start()

    def step(self, step: int, total: int, parts: dict[str, str]) -> None:
        self._calls.put(["step", step, total, parts])

    def print(self, text: str) -> None:
        self._calls.put(["print", text])

    def close(self) -> None:
        self._calls.put(["close"])
        self._calls.put(None)
        self._thread.join(_PATIENCE)

    def _send(self, store: Any) -> None:
        try:
            own = store.clone()  # the connection of the process groups may be waiting
            for number, call in enumerate(iter(self._calls.get, None)):
                own.set(f"{_KEY}/{number}", json.dumps(call))
        except RuntimeError:
            return


class ReceivedView(View):
    """Shows in `view` what a `SentView` sends, and nothing of this rank's own."""

    def __init__(self, store: Any, view: View):
        self._view, self._ends = view, threading.Event()
        self._thread = threading.Thread(target=self._receive, args=(store,), name="console", daemon=True)
        self._thread.start()

    def step(self, step: int, total: int, parts: dict[str, str]) -> None:
        pass

    def print(self, text: str) -> None:
        pass

    def close(self) -> None:
        self._thread.join(_PATIENCE)
        self._ends.set()
        self._view.close()

    def _receive(self, store: Any) -> None:
        number = 0
        try:
            own = store.clone()
            while not self._ends.is_set():
                key = f"{_KEY}/{number}"
                if not own.check([key]):
                    time.sleep(_PAUSE)
                    continue
                name, *arguments = json.loads(own.get(key))
                own.delete_key(key)
                number += 1
                if name == "close":
                    return
                getattr(self._view, name)(*arguments)
        except (RuntimeError, OSError):  # the store has gone, or whoever reads this
            return
