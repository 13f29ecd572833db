"""Checkpoints without values. A save gathers this rank's parts on the host and writes nothing. A load looks up every
tensor of this rank in the index of the run's checkpoint, allocates buffers, and changes nothing in the folder."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from data.storage.url import Place
from mimo_train.layout.run import Run
from mimo_train.preflight.dry_run.fake_tensors import outside


@dataclass
class Files:
    """Results of saving and loading."""

    saved: int = 0
    """Bytes of the newest save of this rank."""
    loaded: str = ""
    """The checkpoint that the run would resume from, or whose weights it would start from; empty: none."""


def install(given: Run) -> Files:
    """Replace the reading and writing of checkpoints, for the rest of this process; `given`: the run as the user starts
    it, while the trial run has other folders."""
    files = Files()
    _install_saves(files)
    _install_loads(given, files)
    return files


def _install_saves(files: Files) -> None:
    from mimo_train.checkpoint import checkpointer, store

    def open_folder(target: store.Target, size: int) -> store.Opened:
        folder = Path(str(target.run_dir)) / "checkpoints"
        return store.Opened(folder / "partial", folder / "final")

    def begin_save(
        target: store.Target, folder: store.Opened, parts: list, record: dict, sizes: Sequence[int], snapshot: Any
    ) -> tuple[Any, Callable[[], None]]:
        copies, wait, hold = (parts, _nothing, _nothing) if snapshot is None else snapshot.take(parts)
        wait()
        for part in copies:
            part.values.cpu()
        files.saved = sum(part.nbytes for part in parts)
        return _Complete(folder.final), hold

    checkpointer.open_folder, checkpointer.begin_save = open_folder, begin_save  # type: ignore[assignment]


def _install_loads(given: Run, files: Files) -> None:
    from mimo_train.checkpoint import checkpointer, folder_changes, folders, load_modules, store
    from mimo_train.checkpoint.format.files import Damage
    from mimo_train.checkpoint.format.read import Reader
    from mimo_train.checkpoint.format.spans import common_numel

    of_runs, load_checkpoint = checkpointer.Checkpointer, store.load_checkpoint
    resume, settings = of_runs.resume, given.cfg.checkpoint

    def dry_resume(self: Any) -> None:
        """Load what the run would load, and start at the first step."""
        tried, own = self._run, copy(given.cfg)
        self._run = replace(given, cfg=own)
        try:
            if settings.resume == "auto":
                folder = folders.newest(given.checkpoints)
            else:
                folder = folders.chosen(given.checkpoints, settings.resume)
            if folder is not None:
                self._continue_from(folder)
                files.loaded = f"resumes {folder}"
            else:
                own.checkpoint = replace(settings, resume="never")
                resume(self)
                named = [settings.weights, *(load.path for load in settings.load_modules.values())]
                files.loaded = "starts from the weights of " + ", ".join(filter(None, named)) if any(named) else ""
        finally:
            self._run, self._resumed = tried, (0, None)

    def without_plain_state(folder: Place, layout: Any, model: list, optimizer: Any, *_: Any) -> dict[str, Any]:
        return load_checkpoint(folder, layout, model, optimizer)

    def by_itself(choose: Callable[[], Place | None], key: str) -> Place | None:
        return choose()

    read = Reader.fill

    def fill(self: Reader, wanted: Iterable[Any]) -> None:
        wanted = list(wanted)
        read(self, [one for one in wanted if not isinstance(one.into, FakeTensor)])
        for one in wanted:
            assert one.into.numel() == one.span.numel, (one.key, one.span, one.into.shape)
            there = sum(common_numel(one.span, piece.span) for piece in self.index.pieces[one.key])
            if there != one.span.numel:
                raise Damage(f"{' '.join(one.key)} has {there} of {one.span.numel} elements")

    of_runs.resume = dry_resume  # type: ignore[method-assign]
    of_runs._read_initial_weights = lambda self: False  # type: ignore[method-assign]
    checkpointer.load_start_weights = lambda model: False
    checkpointer.load_checkpoint = without_plain_state  # type: ignore[assignment]
    Reader.fill, Reader.whole = fill, outside(Reader.whole)  # type: ignore[method-assign]
    for module in (checkpointer, load_modules, store):
        module.chosen_by_first = by_itself  # type: ignore[attr-defined]
    # There are no other ranks to compare with, no weight values, and no step state.
    store.require_taken = load_modules._require_all = store.require_same = _nothing
    store.ModuleOptimizer.load_plain_state = _nothing  # type: ignore[method-assign]
    folder_changes.finish_renames = _nothing


class _Complete:
    is_complete = True

    def __init__(self, folder: Place):
        self.folder = folder

    def local_status(self) -> tuple[bool, bool]:
        """Return (this rank is busy, has failed)."""
        return False, False

    def poll(self, busy: float, failed: float) -> bool:
        return True

    def finish(self) -> Place:
        return self.folder

    def close(self) -> None:
        """Do nothing."""


def _nothing(*_: Any, **__: Any) -> None:
    pass
