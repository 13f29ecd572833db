"""A word to ranks that wait for their data, and so for no message: some rank was asked to end the run."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

_KEY = "mimo_train/end_asked"
_PAUSE = 2.0
"""Seconds between two questions of a rank: each is a message to the one store of the run."""
_PATIENCE = 20.0
"""Seconds that an answer of the store is waited for. Its own time limit does not hold for all that it is asked."""


class EndNotice:
    """Kept in the store by which the ranks have met, over a connection of its own: that of the process groups may be
    waiting. It is opened when it is first needed; without a store that answers nobody is told."""

    def __init__(self, store: dist.Store):
        self._store: dist.Store | None = store
        self._own: dist.Store | None = None
        self._asked = -_PAUSE
        self._guard = threading.Lock()

    def give(self) -> None:
        """Tell the ranks that wait. From any thread."""
        with self._guard:
            self._reach(lambda store: store.set(_KEY, "1"))

    def is_given(self) -> bool:
        """Whether a rank has told; asks every other second."""
        with self._guard:
            now = time.monotonic()
            if now < self._asked + _PAUSE:
                return False
            self._asked = now
            return bool(self._reach(lambda store: store.check([_KEY])))

    def _reach[Answer](self, what: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None where it cannot be reached, and is not asked again."""
        if self._store is None:
            return None
        answer: Future[Answer] = Future()
        # In a thread, which is left behind where no answer comes.
        threading.Thread(target=self._ask, args=(self._store, what, answer), name="end notice", daemon=True).start()
        try:
            return answer.result(_PATIENCE)
        except (RuntimeError, TimeoutError):
            self._store = None
            return None

    def _ask[Answer](self, store: Any, what: Callable[[dist.Store], Answer], answer: Future[Answer]) -> None:
        try:
            if self._own is None:
                self._own = store.clone()  # torch's stubs lack it
            answer.set_result(what(self._own))
        except RuntimeError as error:
            answer.set_exception(error)
