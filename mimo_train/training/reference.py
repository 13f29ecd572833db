"""Log-probabilities of every answer under the weights that a run starts from, for tasks that compare with them.

They are computed once, in the run's own layout before its first step, and stored next to the catalogue. The file's name
has a hash of everything that determines them, so another run of the same weights and data reads them.
"""

import hashlib
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from xxhash import xxh3_64_hexdigest

from data.errors import DataError
from data.index.index_file import catalogue_path
from data.order.packing import Packing
from data.order.sources import MixedOrder
from data.order.step_plan import Padding
from data.samples.bad_samples import require_budget
from data.samples.protocol import Samples
from data.samples.shard_dataset import ShardDataset
from data.storage.files import replacing
from mimo_train.checkpoint.frozen_base import fingerprint
from mimo_train.checkpoint.local_shards import shards_of_model
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.held_out import Ending, HeldOut, evaluating
from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.run import Run
from mimo_train.logging.console import CountBar
from mimo_train.parallel.collectives import agreed
from mimo_train.training.data_setup import PreparationStopped
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.forward_step import gpt_forward_step, mimo_forward_step
from mimo_train.training.step.pipeline import Pipeline
from mimo_train.training.step.state import TrainState
from mimo_train.training.tasks.answers import Answers


class References:
    """Gives datasets the log-probabilities of their answers under the weights that the run starts from."""

    def __init__(
        self,
        run: Run,
        pipeline: Pipeline,
        progress: TrainState,
        ending: Ending,
        trained: ConfigContainer | None = None,
    ):
        """Note the fingerprint of the start weights in `progress` if this is the start. Collective over all ranks.

        Args:
            trained: config of the run that trained the model, if it is not `run.cfg`.
        """
        self._trained = trained or run.cfg
        self._run, self._pipeline, self._progress, self._ending = run, pipeline, progress, ending
        self.needed = run.cfg.traits.needs_reference
        if self.needed and not progress.step:
            weights = fingerprint(shards_of_model(pipeline.model))
            progress.start_weights = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:6], "little")

    def serve(self, dataset: Samples, padding: Padding | Packing | None, name: str) -> None:
        """Set `dataset.reference`, if the task needs it. Collective over all ranks.

        Args:
            padding: see `open_loader`.
            name: of the dataset, for the progress bar.

        Raises:
            UserError: they are missing, and the run has trained since its start.
            DataError: they cannot be stored.
            PreparationStopped: a rank was asked to end the run.
            TooManyBadSamples: more samples are bad than `data.max_bad_samples` allows.
        """
        if not self.needed:
            return
        RECORDER.to("reference")
        assert isinstance(dataset, ShardDataset), "checked by `token_dataset`"
        path = self._path(dataset)
        shape = sum(part.rows for part in dataset.order.parts), dataset.answers
        with agreed():
            values = _read(path, shape) if dist.get_rank() == 0 else None
        values = self._from_first_rank(values, shape)
        if values is None:
            if self._progress.step:
                raise UserError(
                    f"train.task: {self._run.cfg.train.task} compares with the weights at the start of the run, but "
                    f"their log-probabilities are not in {path} (removed, or of other settings), and step "
                    f"{self._progress.step} has other weights. Restore the file and the settings, or start a new run "
                    "with checkpoint.weights"
                )
            values = self._compute(dataset, padding, shape, name)
            with agreed():
                if dist.get_rank() == 0:
                    _write(path, values)
        dataset.reference = values

    def serve_held_out(self, held_out: HeldOut) -> None:
        """Set the log-probabilities of a held-out set, see `serve`."""
        self.serve(held_out.dataset, held_out.padding, f"{held_out.prefix.rstrip('/')} samples")

    def _path(self, dataset: ShardDataset) -> Path:
        """Return the file of the values. Its name has a hash of all that determines them, the layout aside."""
        cfg = self._trained
        # Adapters of a checkpoint or a directory are not zero at the start.
        scales = {name: module.lora.rank and module.lora.scale for name, module in cfg.modules.items()}
        modules = [
            (name, module.encoder, module.projector, module.placeholder, module.llm, cfg.fp8_of(name), scales[name])
            for name, module in sorted(cfg.modules.items())
        ]
        settings = (
            self._progress.start_weights,
            dataset.fingerprint,
            # Of shards that are split, each set has rows of its own.
            [part.held is not None and part.only_held for part in dataset.order.parts],
            dataset.lengths_keys(),
            cfg.traits.form,
            (cfg.data.blind, cfg.data.background, cfg.train.precision),
            modules,
        )
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
        return catalogue_path(dataset.shards[0], dataset.cache_dir, writable=True, suffix=f".{digest}.mimo-reference")

    def _from_first_rank(self, values: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray | None:
        """Return what rank 0 has read, on every rank. Collective."""
        device = self._pipeline.device
        known = torch.tensor(int(values is not None), device=device)
        dist.broadcast(known, 0)
        if not int(known):
            return None
        tensor = torch.zeros(shape, device=device) if values is None else torch.from_numpy(values).to(device)
        dist.broadcast(tensor, 0)
        return tensor.cpu().numpy()

    def _compute(
        self, dataset: ShardDataset, padding: Padding | Packing | None, shape: tuple[int, int], name: str
    ) -> np.ndarray:
        """Return the values of every row, NaN for bad samples and rows of other sets. Collective."""
        order = dataset.order
        in_rows = MixedOrder(order.parts, [], shuffle=False)
        _set_order(dataset, in_rows)
        try:
            values = self._pass(dataset, padding, shape, name)
        finally:
            _set_order(dataset, order)
        return values

    def _pass(
        self, dataset: ShardDataset, padding: Padding | Packing | None, shape: tuple[int, int], name: str
    ) -> np.ndarray:
        run, pipeline, size = self._run, self._pipeline, len(dataset)
        step_size = run.batch.global_batch_size
        steps = ceil(size / step_size)
        forward = mimo_forward_step if run.cfg.encoders else gpt_forward_step
        step_func = partial(forward, SimpleNamespace(task=_log_probs))  # type: ignore[arg-type]
        values = torch.zeros(shape, device=pipeline.device)
        bad_rows: list[int] = []
        groups = pipeline.groups.collections
        # One rank of each replica gives its values to the sum over ranks.
        gives = pipeline.is_last_stage and groups[LANGUAGE].tp.rank() == groups[LANGUAGE].cp.rank() == 0
        ending = self._ending
        loader = open_loader(
            run, pipeline.groups, dataset, consumed=0, steps=steps, padding=padding, gives_up=ending.gives_up
        )
        iterator = StepIterator(
            loader, pipeline, votes=ending.votes, samples=size, learned_logits=run.cfg.train.logits == "learned"
        )
        bar = CountBar(f"log-probabilities of {name}", size, "samples") if dist.get_rank() == 0 else None
        try:
            with evaluating(pipeline.model):
                for _ in range(steps):
                    if iterator.advance() is None:
                        raise PreparationStopped(
                            "the run was asked to end while the log-probabilities of the start weights were computed. "
                            "Nothing is trained yet; start it again"
                        )
                    results = pipeline.run(step_func, iterator, forward_only=True, collect_non_loss_data=True)
                    for numbers, logps in results if gives else ():
                        real = numbers < size  # the last step may wrap around to the first samples
                        rows = torch.from_numpy(dataset.order.rows(numbers[real].numpy()))
                        values[rows.to(values.device)] = logps[real.to(logps.device)]
                    bad = iterator.current.first_sample + iterator.bad.nonzero().flatten().cpu().numpy()
                    bad_rows += dataset.order.rows(bad[bad < size]).tolist()
                    if bar is not None:
                        bar.add(min(size - iterator.current.first_sample, step_size))
        finally:
            iterator.close()
            if bar is not None:
                bar.close()
        require_budget(len(bad_rows), dataset.allowed_bad_samples, dataset.bad_samples.latest)
        dist.all_reduce(values)
        result = values.cpu().numpy()
        trained = np.zeros(len(result), dtype=bool)
        trained[dataset.order.rows(np.arange(size))] = True
        trained[bad_rows] = False
        result[~trained] = np.nan
        return result


def _set_order(dataset: ShardDataset, order: MixedOrder) -> None:
    dataset.order = order
    dataset.set_phases(order.phases)  # forgets what is kept by sample number


def _log_probs(
    batch: dict[str, Any], groups: Any, output: torch.Tensor, non_loss_data: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sample numbers [N], log-probabilities of their answers [N, K]), in the place of a task's loss."""
    return batch["sample_numbers"], Answers.of(batch, groups, output).logps_NK


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Return the values of a file, float32 `shape`; None if it is missing or damaged."""
    with suppress(OSError, SafetensorError, KeyError, TypeError), safe_open(path, "numpy") as file:
        values = file.get_tensor("log_probs")
        if values.shape == shape and xxh3_64_hexdigest(values) == file.metadata()["check"]:
            return values
    return None


def _write(path: Path, values: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o644) as file:
            file.write(save({"log_probs": values}, metadata={"check": xxh3_64_hexdigest(values)}))
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write {path} ({error}). Set it to a folder that can be written"
        ) from error
