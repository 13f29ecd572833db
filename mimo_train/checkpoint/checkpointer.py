"""Save and load a run: one object, created at set-up, that holds everything a checkpoint contains."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from data.storage.url import Place, place_of
from mimo_train.checkpoint import best, folders
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.checkpoint.format.write import Part
from mimo_train.checkpoint.frozen_base import fingerprint, is_frozen
from mimo_train.checkpoint.load import load_base, load_checkpoint, load_weights
from mimo_train.checkpoint.load_modules import Loaded, load_modules
from mimo_train.checkpoint.local_shards import (
    Fingerprints,
    LocalShard,
    parts_to_write,
    shards_of_model,
)
from mimo_train.checkpoint.rank_state import parts_of_rank
from mimo_train.checkpoint.resume.choose import SetAside, chosen_by_first, newest_that_loads
from mimo_train.checkpoint.resume.same_run import (
    config_changes,
    left_behind,
    resume_faults,
    unread_weights,
    weights_faults,
)
from mimo_train.checkpoint.save import Save, Snapshot, Target, memory_demand, memory_shortage
from mimo_train.config.compose import to_dict
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.inputs.mixture import Mixing
from mimo_train.layout.run import Run
from mimo_train.models.parameters import gathered, load_start_weights
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.parallel import device
from mimo_train.parallel.collectives import agreed

_logger = logging.getLogger(__name__)

SUMS = "log_sums"
"""Key of a record: the log's sums since its last line; null if the log has just been written."""


class Checkpointer:
    """Checkpoints of one run. Methods are collective over all ranks unless they say otherwise."""

    NUMBER = Save.NUMBER
    """Numbers per rank in a step's message, see `local_status`."""

    def __init__(
        self,
        run: Run,
        model: list[MegatronModule],
        optimizer: ModuleOptimizer,
        schedulers: ModuleSchedulers,
        train_state: Any,
        rerun: Any,
        fingerprints: Fingerprints,
        read_pretrained: Callable[[], bool] = lambda: False,
        read_adapters: Callable[[], bool] = lambda: False,
        mixing: Mixing | None = None,
        *,
        drawn: bool = True,
    ):
        """Keep references to everything that a checkpoint contains.

        Args:
            train_state: progress of the run (`TrainState`).
            rerun: state of a step that may have to be repeated (`debug.rerun.Rerun`).
            read_pretrained: fills a new run's model from its modules' directories; returns True if there are any.
                Collective.
            read_adapters: fills a new run's adapters from those that its modules start with; returns True if there are
                any. Collective.
            mixing: the sources' weights, which resume from the checkpoint's.
            drawn: True if the model has initial weights; required unless `frozen_base.loads_every_weight`.
        """
        self._drawn = drawn
        self._read_pretrained, self._read_adapters = read_pretrained, read_adapters
        self._mixing = mixing
        self._run, self._model, self._optimizer, self._schedulers = run, model, optimizer, schedulers
        self._train_state, self._rerun, self._fingerprints = train_state, rerun, fingerprints
        self._snapshot, self._save = Snapshot(), cast(Save | None, None)
        self._status: Sequence[float] | None = None
        self._parameters: list[LocalShard] | None = None
        self._sums, self._resumed = cast(Any, None), cast(tuple[int, dict[str, Any] | None], (0, None))
        self.set_aside: list[SetAside] = []
        """Damaged checkpoints that `resume` has skipped."""
        self.resumed_step = -1
        """The step of this run's persistent checkpoint that it resumes from; -1 if it starts from another one."""
        self.loaded: list[Loaded] = []
        """Modules whose weights `resume` has taken from other runs."""
        self.config_changes = ""
        """Config changes since the checkpoint that affect results."""
        self.unread_weights = ""
        """Configured initial weights that are not read because the run resumes."""
        self.memory_shortage = ""
        """Memory that hosts lack for `checkpoint.asynchronous=auto`, at the last save; empty for none."""

    def save(self, data: Any = None, *, non_persistent: bool = False, run_dir: Place | None = None) -> Place:
        """Write a checkpoint after finishing the one in flight and pending parameter gathers.

        Args:
            data: the step's iterator, if a step may have to be repeated (`train.rerun`).
            non_persistent: True for the kind of which only the newest is kept.
            run_dir: folder that keeps all its checkpoints, instead of `run.dir` with `checkpoint.keep`. Its weights may
                be NaN or infinite.

        Returns:
            Folder of the complete checkpoint.

        Raises:
            SaveFailed: this checkpoint or the one in flight cannot be written; on every rank.
        """
        self.finish()
        self._begin(data, non_persistent, run_dir, in_background=False)
        folder = self.finish()
        assert folder is not None
        return folder

    def begin(self, data: Any = None, *, non_persistent: bool = False) -> Place | None:
        """Start a checkpoint alongside training if `checkpoint.asynchronous` allows it, else write it. See `save`.

        No save may be in flight.

        Returns:
            Its folder if it is complete; None if it is in flight.
        """
        assert self._save is None
        in_background = self._begin(data, non_persistent, None, in_background=True)
        return None if in_background else self.finish()

    def local_status(self) -> tuple[float, ...]:
        """Return this rank's status of the save in flight, for the message of a step."""
        return tuple(map(float, self._save.local_status())) if self._save is not None else ()

    def receive(self, status: Sequence[float]) -> None:
        """Store the sum over ranks of `local_status`, for `poll`."""
        self._status = status

    def poll(self) -> Place | None:
        """Advance the save in flight by the last step's message. All ranks get the same result.

        Returns:
            The checkpoint's folder, if it is complete now.

        Raises:
            SaveFailed: the save has failed; on every rank.
        """
        save, status, self._status = self._save, self._status, None
        # A step that was skipped or ended early has sent no message.
        if save is None or status is None:
            return None
        try:
            if save.poll(*status):
                self._save = None
        except BaseException:
            self._save = None
            raise
        return save.folder if save.is_complete else None

    def finish(self) -> Place | None:
        """Wait for the save in flight. Collective.

        Returns:
            The checkpoint's folder; None if no save was in flight.

        Raises:
            SaveFailed: it cannot be written; on every rank.
        """
        save, self._save = self._save, None
        return save.finish() if save is not None else None

    def note_sums(self, sums: Any) -> None:
        """Save these sums from now on. Load them if the run has just resumed and made no step since."""
        self._sums = sums
        step, state = self._resumed
        if state is not None and step == self._train_state.step:
            sums.load_state_dict(state)

    def _shards(self) -> list[LocalShard]:
        """Return this rank's tensors of the model, cached if all are parameters. Parameters stay the same objects, and
        finding them takes as long as copying 150 MB; a buffer may be replaced."""
        if self._parameters is None:
            shards = shards_of_model(self._model)
            if not all(isinstance(shard.tensor, torch.nn.Parameter) for shard in shards):
                return shards
            self._parameters = shards
        return self._parameters

    def _begin(self, data: Any, non_persistent: bool, run_dir: Place | None, *, in_background: bool) -> bool:
        cfg, run = self._run.cfg.checkpoint, self._run
        target = self._target(non_persistent, run_dir)
        with gathered(self._model):
            rerun = self._rerun.state_dict(data)
            parts, left_out = self.local_parts(rerun, finite=run_dir is None)
            nbytes = sum(part.nbytes for part in parts)
            sums = self._sums.state_dict() if self._sums else None
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (nbytes, memory_demand(nbytes, self._snapshot), sums))
            sizes, demands, log_sums = zip(*ranks, strict=True)
            record = {
                "step": self._train_state.step,
                "train_state": self._train_state.state_dict(),
                "schedulers": self._schedulers.state_dict(),
                "optimizer": self._optimizer.plain_state(),
                "layout": folders.recorded_layout(run.layout),
                "config": to_dict(run.cfg),
                "rerun": rerun is not None,
                SUMS: next((sums for sums in log_sums if sums is not None), None),
                **left_out,
                **self._fingerprints.record(),
                **(self._mixing.record() if self._mixing else {}),
            }
            self.memory_shortage = ""
            if in_background and cfg.asynchronous == "auto":
                self.memory_shortage = memory_shortage(demands)
            in_background = in_background and bool(cfg.asynchronous) and not self.memory_shortage
            self._save = Save(target, parts, record, sizes, self._snapshot if in_background else None)
        self._optimizer.before_update, self._status = self._save.hold, None
        return in_background

    def _target(self, non_persistent: bool = False, run_dir: Place | None = None) -> Target:
        cfg, keep_best = self._run.cfg.checkpoint, self._run.cfg.checkpoint.keep_best
        return Target(
            run_dir or self._run.checkpoints,
            self._train_state.step,
            non_persistent,
            0 if run_dir else cfg.keep,
            cfg.keep_every,
            tuple(step for step, _ in self._best()),
            keep_best.count,
        )

    def _best(self) -> list[tuple[int, float]]:
        """Return (step, value) of evaluations, the best first; none without `checkpoint.keep_best`."""
        watch = self._run.cfg.checkpoint.keep_best
        return best.ranked(self._train_state.scores.get(watch.metric, []), watch.mode)

    def is_among_best(self) -> bool:
        """True if the evaluation of the current step is among the `checkpoint.keep_best.count` best so far."""
        count = self._run.cfg.checkpoint.keep_best.count
        return self._train_state.step in [step for step, _ in self._best()[:count]]

    def name_best(self) -> None:
        """Write the file that names the best checkpoints, on rank 0, and remove those that are no longer kept, unless a
        save is in flight, which does so. An error is a warning, because a run does not end for it."""
        if dist.get_rank() != 0:
            return
        checkpoints, watch = folders.checkpoints_dir(self._run.checkpoints), self._run.cfg.checkpoint.keep_best
        try:
            best.write(checkpoints, watch, self._best())
        except OSError as error:
            _logger.warning("the file that names the best checkpoints cannot be written (%s)", error)
        if self._save is None:
            self._target().remove_old()

    def local_parts(self, rerun: dict[str, Any] | None, *, finite: bool) -> tuple[list[Part], dict[str, str]]:
        """Return what this rank writes, as views of the live tensors. Collective.

        With `checkpoint.trained_only`, weights that the run never trains are replaced by a fingerprint.

        Args:
            rerun: this rank's state for repeating the step; on all ranks or on none.
            finite: True to require finite weights.

        Returns:
            (the parts, record entries of the weights that are left out).
        """
        shards, left_out = self._shards(), {}
        if self._run.cfg.checkpoint.trained_only:
            frozen = [shard for shard in shards if is_frozen(shard, self._optimizer.releases)]
            left_out = {LEFT_OUT: fingerprint(frozen)}
            shards = [shard for shard in shards if shard not in frozen]
        parts = [*parts_to_write(shards, self._optimizer, finite=finite), *parts_of_rank("rng", device.get_rng_state())]
        return parts + (parts_of_rank("rerun", rerun) if rerun is not None else []), left_out

    def resume(self) -> Place | None:
        """Resume from the checkpoint that `checkpoint.resume` chooses, or load the initial weights of a new run.

        Initial weights come from `checkpoint.weights`, `modules.NAME.pretrained`, or encoders that bring their own.

        Returns:
            Folder that the run resumes from; None for a new run.

        Raises:
            UserError: the checkpoint has another model, tokenizer or shards; or it is damaged, and it was named or
                there is no earlier one. On every rank.
        """
        cfg, layout = self._run.cfg, self._run.layout
        self.set_aside, self.loaded, self.config_changes, self.unread_weights = [], [], "", ""
        if cfg.checkpoint.resume == "auto":
            folder, self.set_aside = newest_that_loads(self._run.checkpoints, self.continue_from)
        else:
            key = "checkpoint.resume"
            folder = chosen_by_first(lambda: folders.chosen(self._run.checkpoints, cfg.checkpoint.resume), key)
            if folder is not None:
                self.continue_from(folder)
        if folder is not None:
            if folder.parent == folders.checkpoints_dir(self._run.checkpoints):
                self.resumed_step = self._train_state.step
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
            # Collective, although ranks may differ in whether an encoder has brought weights.
            read = self._read_adapters() or read
        self.loaded = load_modules(cfg, self._model, self._fingerprints.vocabulary)
        if read or self.loaded:
            # The optimizer holds master copies of the initial weights.
            self._optimizer.reload_model_params()
        return None

    def continue_from(self, folder: Place) -> None:
        """Load everything from a checkpoint. Collective; see `resume` for errors."""
        cfg, layout = self._run.cfg, self._run.layout
        self._require_none(partial(self._resume_faults, folder))
        with agreed():
            partly = LEFT_OUT in folders.read_record(folder)
        if partly:
            self._require_drawn()
            self._read_initial_weights()
        load_base(folder, layout, self._model, cfg.checkpoint.weights)
        if partly:
            # As when the run began; `loaded` is for new runs only.
            load_modules(cfg, self._model, self._fingerprints.vocabulary)
        record = load_checkpoint(folder, layout, self._model, self._optimizer, self._schedulers, self._train_state)
        self._resumed = self._train_state.step, record.get(SUMS)
        with agreed():
            self.config_changes = config_changes(folder, record, cfg)
            self.unread_weights = unread_weights(folder, record, cfg)
        if self._mixing is not None:
            self._mixing.continue_from(record)
        if record["rerun"] is not None and self._train_state.step + 1 not in cfg.train.skip_iters:
            self._rerun.load_state_dict(record["rerun"])

    def _read_initial_weights(self) -> bool:
        """Load a new run's pretrained weights; True if there are any. Collective."""
        read = self._read_pretrained()
        with agreed():
            return load_start_weights(self._model) or read

    def _require_drawn(self) -> None:
        """Raise UserError on every rank if a checkpoint that was to bring all weights is gone."""
        if not self._drawn:
            raise UserError(
                f"checkpoint.resume: the checkpoints in {self._run.checkpoints} were changed while this run started: "
                "start it again"
            )

    def _require_none(self, faults: Callable[[], list[Fault]]) -> None:
        """Raise ConfigError on every rank if any rank finds faults. Collective."""
        with agreed():
            if faults_now := faults():
                raise ConfigError(faults_now)

    def _resume_faults(self, folder: Place) -> list[Fault]:
        return resume_faults(
            folder,
            folders.read_record(folder, "config"),
            self._run.cfg,
            data_fingerprint=self._fingerprints.data,
            text_fingerprint=self._fingerprints.text,
            data_size=self._fingerprints.data_size,
        )

    def _weights_faults(self, folder: Place) -> list[Fault]:
        record, vocabulary = folders.read_record(folder, "config"), self._fingerprints.vocabulary
        return weights_faults(folder, record, self._run.cfg, vocabulary_fingerprint=vocabulary)

    def close(self) -> None:
        """Wait for what this rank writes, also after a failure. Not collective."""
        if self._save is not None:
            self._save.close()
