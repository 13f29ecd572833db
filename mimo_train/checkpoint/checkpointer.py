"""Saves and loads a run: one object, created at set-up, that holds everything a checkpoint contains."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.fallback import SetAside, newest_that_loads
from mimo_train.checkpoint.frozen_base import LEFT_OUT
from mimo_train.checkpoint.modules import Loaded, load_modules
from mimo_train.checkpoint.same_run import resume_faults, weights_faults
from mimo_train.checkpoint.store import load_base, load_checkpoint, load_weights, save_checkpoint
from mimo_train.config.fault import ConfigError, Fault
from mimo_train.model.param_gather import gathered
from mimo_train.model.start_weights import load_start_weights
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.parallel.agreement import agreed
from mimo_train.plan.run import Run


class Stateful(Protocol):
    """Plain numbers that a checkpoint holds."""

    step: int

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class Repeatable(Protocol):
    """State of a step that may have to be repeated, for example `mimo_train.diagnose.rerun.Rerun`."""

    def state_dict(self, data: Any) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Fingerprints:
    """What a run reads, as far as a checkpoint depends on it."""

    data: str
    """Of the training shards; a checkpoint of others is refused."""
    text: str
    """Of tokenizer, chat template and placeholders, likewise."""
    vocabulary: str
    """Of the tokenizer's vocabulary; weights that were trained with another one are refused."""

    def record(self) -> dict[str, str]:
        """As a checkpoint's record has them."""
        return {f"{name}_fingerprint": value for name, value in asdict(self).items()}


class Checkpointer:
    """Checkpoints of one run. Every method is collective over all ranks."""

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
    ):
        """
        Args:
            read_pretrained: fills the model of a new run from the directories of its modules; returns whether there
                are any. Collective.
            read_adapters: fills the adapters of a new run from those that its modules start with; returns whether there
                are any. Collective.
        """
        self._read_pretrained, self._read_adapters = read_pretrained, read_adapters
        self._run, self._model, self._optimizer, self._schedulers = run, model, optimizer, schedulers
        self._train_state, self._rerun, self._fingerprints = train_state, rerun, fingerprints
        self.set_aside: list[SetAside] = []
        """Damaged checkpoints that `resume` has passed over."""
        self.loaded: list[Loaded] = []
        """Modules whose weights `resume` has taken from other runs."""

    def save(self, data: Any = None, *, non_persistent: bool = False, run_dir: Path | None = None) -> Path:
        """Write a checkpoint of the run; pending parameter gathers are completed first.

        Args:
            data: the step's iterator, if a step may have to be repeated (`train.rerun`).
            non_persistent: whether it is of the kind of which only the newest is kept.
            run_dir: a folder in which all checkpoints are kept, instead of `run.dir` with its `checkpoint.keep`.

        Returns:
            The checkpoint's folder; it is complete.
        """
        with gathered(self._model):
            return save_checkpoint(
                run_dir or self._run.dir,
                self._run,
                self._model,
                self._optimizer,
                self._schedulers,
                self._train_state,
                self._fingerprints.record(),
                keep=0 if run_dir else self._run.cfg.checkpoint.keep,
                non_persistent=non_persistent,
                rerun=self._rerun.state_dict(data),
            )

    def resume(self) -> Path | None:
        """Continue from the checkpoint that `checkpoint.resume` chooses, or begin with the weights of
        `checkpoint.weights`, or with those of `modules.NAME.pretrained` and those that an encoder brings itself.

        Returns:
            The folder that the run continues from; None for a new run.

        Raises:
            UserError: the checkpoint is of another model, tokenizer or other shards; or it is damaged, and it was
                named, or there is none before it. On every rank.
        """
        cfg, layout = self._run.cfg, self._run.layout
        self.set_aside, self.loaded = [], []
        if cfg.checkpoint.resume == "auto":
            folder, self.set_aside = newest_that_loads(self._run.dir, self._continue_from)
        else:
            folder = self._chosen()
            if folder is not None:
                self._continue_from(folder)
        if folder is not None:
            return folder
        if cfg.checkpoint.weights:
            weights = folders.in_folder(Path(cfg.checkpoint.weights), "checkpoint.weights")
            self._require_none(partial(self._weights_faults, weights))
            load_weights(weights, layout, self._model)
            read = True
        else:
            read = self._read_initial_weights()
            # Collective, and whether an encoder has brought weights differs by rank.
            read = self._read_adapters() or read
        self._load_modules()
        if read or self.loaded:
            # The optimizer holds master copies of the initial weights.
            self._optimizer.reload_model_params()
        return None

    def _continue_from(self, folder: Path) -> None:
        """Load all of a checkpoint. Collective.

        Raises:
            UserError: as of `resume`.
        """
        cfg, layout = self._run.cfg, self._run.layout
        self._require_none(partial(self._resume_faults, folder))
        with agreed():
            partly = LEFT_OUT in folders.read_record(folder)
        if partly:
            self._read_initial_weights()
        load_base(folder, layout, self._model, cfg.checkpoint.weights)
        if partly:
            self._load_modules()
        whole = (self._model, self._optimizer, self._schedulers, self._train_state)
        record = load_checkpoint(folder, layout, *whole)
        if record["rerun"] is not None and self._train_state.step + 1 not in cfg.train.skip_iters:
            self._rerun.load_state_dict(record["rerun"])

    def _load_modules(self) -> None:
        self.loaded = load_modules(self._run.cfg, self._model, self._fingerprints.vocabulary)

    def _read_initial_weights(self) -> bool:
        """Weights of a new run that are not drawn; whether there are any. Collective."""
        read = self._read_pretrained()
        with agreed():
            return load_start_weights(self._model) or read

    def _require_none(self, faults: Callable[[], list[Fault]]) -> None:
        """Raise ConfigError on every rank if there are faults on any. Collective."""
        with agreed():
            found = faults()
            if found:
                raise ConfigError(found)

    def _resume_faults(self, folder: Path) -> list[Fault]:
        mine = self._fingerprints
        given = {"data_fingerprint": mine.data, "text_fingerprint": mine.text}
        return resume_faults(folder, folders.read_record(folder, "config"), self._run.cfg, **given)

    def _weights_faults(self, folder: Path) -> list[Fault]:
        record, mine = folders.read_record(folder, "config"), self._fingerprints.vocabulary
        return weights_faults(folder, record, self._run.cfg, vocabulary_fingerprint=mine)

    def _chosen(self) -> Path | None:
        """The checkpoint that the config names: rank 0 chooses, and every rank must find it. Collective."""
        box = list[Path | None]([None])
        with agreed():
            if dist.get_rank() == 0:
                box = [folders.chosen(self._run.dir, self._run.cfg.checkpoint.resume)]
        dist.broadcast_object_list(box)
        folder = box[0]
        with agreed():
            if folder is not None:
                folders.require_seen(folder)
        return folder

    def close(self) -> None:
        """Wait until everything that was saved is on disk. Saving is synchronous: there is nothing to wait for."""
