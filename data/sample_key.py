"""Keys of samples in messages."""

from collections.abc import Callable


class SampleKey:
    """The key of a sample that is looked up where a message needs it: those of a shard are unpacked together."""

    def __init__(self, look_up: Callable[[], str]) -> None:
        self._look_up = look_up

    def __str__(self) -> str:
        return self._look_up()

    def __repr__(self) -> str:
        return repr(str(self))


Key = str | SampleKey
