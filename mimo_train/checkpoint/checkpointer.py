"""Saves and loads a run: one object, created at set-up, that holds everything a checkpoint contains."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from data.storage.url import Place, place_of
from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.background_save import Demand, InFlight, Snapshot, lacking
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.checkpoint.load_modules import Loaded, load_modules
from mimo_train.checkpoint.local_shards import Fingerprints, Held, Repeatable, Stateful, Sums, held_tensors
from mimo_train.checkpoint.resume.choose import SetAside, chosen_by_first, newest_that_loads
from mimo_train.checkpoint.resume.config_diff import BEGAN, began_with, begun_with
from mimo_train.checkpoint.resume.same_run import (
    begun_otherwise,
    continued_otherwise,
    left_behind,
    resume_faults,
    weights_faults,
)
from mimo_train.checkpoint.store import (
    Target,
    begin_save,
    load_base,
    load_checkpoint,
    load_weights,
    open_folder,
    record_of,
    save_parts,
)
from mimo_train.config.compose import to_dict
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.inputs.mixture import Mixing
from mimo_train.layout.run import Run
from mimo_train.models.initial_weights import load_start_weights
from mimo_train.models.parameters import gathered
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.parallel.collectives import agreed

SUMS = "log_sums"
"""Key of a record: what the log had summed since its last line; null where the log had just been written."""


class Checkpointer:
    """Checkpoints of one run. Methods are collective over all ranks, unless they say otherwise."""

    NUMBER = InFlight.NUMBER
    """Numbers of a rank in a step's message, see `own`."""

    def __init__(
        self,
        run: Run,
        model: list[MegatronModule],
        optimizer: ModuleOptimizer,
        schedulers: ModuleSchedulers,
        train_state: Stateful,
        rerun: Repeatable,
        fingerprints: Fingerprints,
        read_pretrained: Callable[[], bool] = lambda: False,
        read_adapters: Callable[[], bool] = lambda: False,
        mixing: Mixing | None = None,
        *,
        drawn: bool = True,
    ):
        """
        Args:
            read_pretrained: fills the model of a new run from the directories of its modules; returns whether there
                are any. Collective.
            mixing: the weights of the sources, which go on from those of the checkpoint.
            read_adapters: fills the adapters of a new run from those that its modules start with; returns whether there
                are any. Collective.
            drawn: whether the model has initial weights, as it must unless `every_weight.loads_every_weight`.
        """
        self._drawn = drawn
        self._read_pretrained, self._read_adapters = read_pretrained, read_adapters
        self._mixing = mixing
        self._run, self._model, self._optimizer, self._schedulers = run, model, optimizer, schedulers
        self._train_state, self._rerun, self._fingerprints = train_state, rerun, fingerprints
        self._snapshot, self._save = Snapshot(), cast(InFlight | None, None)
        self._status: Sequence[float] | None = None
        self._parameters: list[Held] | None = None
        self._sums, self._resumed = cast(Sums | None, None), cast(tuple[int, dict[str, Any] | None], (0, None))
        self._began = begun_with(to_dict(run.cfg))
        self.set_aside: list[SetAside] = []
        """Damaged checkpoints that `resume` has passed over."""
        self.loaded: list[Loaded] = []
        """Modules whose weights `resume` has taken from other runs."""
        self.otherwise = ""
        """What this run does otherwise than the one that `resume` continues, where its numbers follow from it."""
        self.unread = ""
        """Weights that it was told to begin with, where it continues with its own."""
        self.lacking = ""
        """What hosts lack for `checkpoint.asynchronous=auto`, as of the last save; empty: nothing."""

    def save(self, data: Any = None, *, non_persistent: bool = False, run_dir: Place | None = None) -> Place:
        """Write a checkpoint of the run, after one that is in flight; pending parameter gathers are completed first.

        Args:
            data: the step's iterator, if a step may have to be repeated (`train.rerun`).
            non_persistent: whether it is of the kind of which only the newest is kept.
            run_dir: a folder in which all checkpoints are kept, instead of `run.dir` with its `checkpoint.keep`. There
                weights may be NaN or infinite.

        Returns:
            The checkpoint's folder; it is complete.

        Raises:
            SaveFailed: this one or the one in flight cannot be written; on every rank.
        """
        self.finish()
        self._begin(data, non_persistent, run_dir, beside=False)
        folder = self.finish()
        assert folder is not None
        return folder

    def begin(self, data: Any = None, *, non_persistent: bool = False) -> Place | None:
        """Begin to write a checkpoint beside training, as `checkpoint.asynchronous` has it; otherwise write it. None
        may be in flight. Arguments and errors as of `save`.

        Returns:
            Its folder, if it is complete; None: it is in flight.
        """
        assert self._save is None
        beside = self._begin(data, non_persistent, None, beside=True)
        return None if beside else self.finish()

    def local_status(self) -> tuple[float, ...]:
        """Return what this rank knows of the save in flight, for the message of a step."""
        return tuple(map(float, self._save.own())) if self._save is not None else ()

    def receive(self, status: Sequence[float]) -> None:
        """Take the sum over ranks of `local_status`, for `poll`."""
        self._status = status

    def poll(self) -> Place | None:
        """Learn from the message of the last step what became of the save in flight. All ranks learn the same.

        Returns:
            The checkpoint's folder, if it is complete now.

        Raises:
            SaveFailed: it will not be; on every rank.
        """
        save, status, self._status = self._save, self._status, None
        # A step that was left out, or ended early, has sent no message.
        if save is None or status is None:
            return None
        try:
            if save.heard(*status):
                self._save = None
        except BaseException:
            self._save = None
            raise
        return save.folder if save.is_complete else None

    def finish(self) -> Place | None:
        """Wait for the save in flight. Collective.

        Returns:
            The checkpoint's folder; None where no save was in flight.

        Raises:
            SaveFailed: it cannot be written; on every rank.
        """
        save, self._save = self._save, None
        return save.finish() if save is not None else None

    def note_sums(self, sums: Sums) -> None:
        """Save these from now on; and if the run has been resumed, and no step was made since, load them."""
        self._sums = sums
        step, state = self._resumed
        if state is not None and step == self._train_state.step:
            sums.load_state_dict(state)

    def _held(self) -> list[Held]:
        """What this rank has of the model. Parameters stay the same objects, and to look for them again takes as long
        as a copy of 150 MB; a module may have put another tensor in the place of a buffer."""
        if self._parameters is None:
            held = held_tensors(self._model)
            if not all(isinstance(one.tensor, torch.nn.Parameter) for one in held):
                return held
            self._parameters = held
        return self._parameters

    def _begin(self, data: Any, non_persistent: bool, run_dir: Place | None, *, beside: bool) -> bool:
        cfg = self._run.cfg.checkpoint
        target = Target(
            run_dir or self._run.checkpoints,
            self._train_state.step,
            non_persistent,
            0 if run_dir else cfg.keep,
            cfg.keep_every,
        )
        with gathered(self._model):
            rerun = self._rerun.state_dict(data)
            parts, left_out = save_parts(self._run, self._held(), self._optimizer, rerun, finite=run_dir is None)
            nbytes = sum(part.nbytes for part in parts)
            own = nbytes, Demand.of(nbytes, self._snapshot.size), self._sums.state_dict() if self._sums else None
            everyone: list[Any] = [own] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            sizes, demands, sums = zip(*everyone, strict=True)
            folder = open_folder(target, sum(sizes))
            others = {
                **left_out,
                "rerun": rerun is not None,
                BEGAN: self._began,
                SUMS: next((one for one in sums if one is not None), None),
                **self._fingerprints.record(),
                **(self._mixing.record() if self._mixing else {}),
            }
            record = record_of(self._run, self._optimizer, self._schedulers, self._train_state, others)
            self.lacking = lacking(demands) if beside and cfg.asynchronous == "auto" else ""
            beside = beside and bool(cfg.asynchronous) and not self.lacking
            self._save, hold = begin_save(target, folder, parts, record, sizes, self._snapshot if beside else None)
        self._optimizer.before_update, self._status = hold, None
        return beside

    def resume(self) -> Place | None:
        """Continue from the checkpoint that `checkpoint.resume` chooses, or begin with the weights of
        `checkpoint.weights`, or with those of `modules.NAME.pretrained` and those that an encoder brings itself.

        Returns:
            The folder that the run continues from; None for a new run.

        Raises:
            UserError: the checkpoint is of another model, tokenizer or other shards; or it is damaged, and it was
                named, or there is none before it. On every rank.
        """
        cfg, layout = self._run.cfg, self._run.layout
        self.set_aside, self.loaded, self.otherwise, self.unread = [], [], "", ""
        if cfg.checkpoint.resume == "auto":
            folder, self.set_aside = newest_that_loads(self._run.checkpoints, self._continue_from)
        else:
            folder = self._chosen()
            if folder is not None:
                self._continue_from(folder)
        if folder is not None:
            return folder
        self._require_drawn()
        self._require_none(lambda: left_behind(cfg))
        if cfg.checkpoint.weights:
            key = "checkpoint.weights"
            weights = chosen_by_first(lambda: folders.in_folder(place_of(cfg.checkpoint.weights), key), key)
            assert weights is not None
            self._require_none(partial(self._weights_faults, weights))
            load_weights(weights, layout, self._model)
            read = True
        else:
            read = self._read_initial_weights()
            # Collective, and whether an encoder has brought weights differs by rank.
            read = self._read_adapters() or read
        self.loaded = load_modules(cfg, self._model, self._fingerprints.vocabulary)
        if read or self.loaded:
            # The optimizer holds master copies of the initial weights.
            self._optimizer.reload_model_params()
        return None

    def _continue_from(self, folder: Place) -> None:
        """Load all of a checkpoint. Collective.

        Raises:
            UserError: as of `resume`.
        """
        cfg, layout = self._run.cfg, self._run.layout
        self._require_none(partial(self._resume_faults, folder))
        with agreed():
            partly = LEFT_OUT in folders.read_record(folder)
        if partly:
            self._require_drawn()
            self._read_initial_weights()
        load_base(folder, layout, self._model, cfg.checkpoint.weights)
        if partly:
            # As its run began: `loaded` tells of what a new run has taken.
            load_modules(cfg, self._model, self._fingerprints.vocabulary)
        whole = (self._model, self._optimizer, self._schedulers, self._train_state)
        record = load_checkpoint(folder, layout, *whole)
        self._resumed = self._train_state.step, record.get(SUMS)
        with agreed():
            self.otherwise = continued_otherwise(folder, record, cfg)
            self.unread = begun_otherwise(folder, record, cfg)
            self._began = began_with(record)
        if self._mixing is not None:
            self._mixing.continue_from(record)
        if record["rerun"] is not None and self._train_state.step + 1 not in cfg.train.skip_iters:
            self._rerun.load_state_dict(record["rerun"])

    def _read_initial_weights(self) -> bool:
        """Weights of a new run that are not drawn; whether there are any. Collective."""
        read = self._read_pretrained()
        with agreed():
            return load_start_weights(self._model) or read

    def _require_drawn(self) -> None:
        """
        Raises:
            UserError: a checkpoint that was to bring all weights is gone; on every rank.
        """
        if not self._drawn:
            raise UserError(
                f"checkpoint.resume: the checkpoints in {self._run.checkpoints} were changed while this run started: "
                "start it again"
            )

    def _require_none(self, faults: Callable[[], list[Fault]]) -> None:
        """Raise ConfigError on every rank if there are faults on any. Collective."""
        with agreed():
            found = faults()
            if found:
                raise ConfigError(found)

    def _resume_faults(self, folder: Place) -> list[Fault]:
        mine = self._fingerprints
        given = {"data_fingerprint": mine.data, "text_fingerprint": mine.text}
        record = folders.read_record(folder, "config")
        size = mine.data_size
        return resume_faults(folder, record, self._run.cfg, **given, data_size=size, mixing=self._mixing)

    def _weights_faults(self, folder: Place) -> list[Fault]:
        record, mine = folders.read_record(folder, "config"), self._fingerprints.vocabulary
        return weights_faults(folder, record, self._run.cfg, vocabulary_fingerprint=mine)

    def _chosen(self) -> Place | None:
        """The checkpoint that `checkpoint.resume` names. Collective."""

        def choose() -> Place | None:
            folder_changes.finish_renames(self._run.checkpoints)
            return folders.chosen(self._run.checkpoints, self._run.cfg.checkpoint.resume)

        return chosen_by_first(choose, "checkpoint.resume")

    def close(self) -> None:
        """Wait for what this rank writes, also after a failure: not collective."""
        if self._save is not None:
            self._save.close()
