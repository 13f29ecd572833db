"""Build everything the loop needs from a run: processes, groups, model, optimizer, data, loggers, resume."""

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from data.samples.protocol import Samples
from data.samples.shard_dataset import ShardDataset
from data.storage.url import Place, Url
from data.text.tokens import Tokenizer
from data.workers import never
from mimo_train.checkpoint.checkpointer import Checkpointer
from mimo_train.checkpoint.frozen_base import loads_every_weight
from mimo_train.checkpoint.local_shards import Fingerprints
from mimo_train.config.compose import to_yaml
from mimo_train.config.errors import UserError
from mimo_train.config.paths import make_folder
from mimo_train.config.pretrained.fill_in import all_parts, parts_there
from mimo_train.config.schema_mix import source_names
from mimo_train.debug.profiling import StepProfiler
from mimo_train.debug.rerun import Rerun
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.evaluation.held_out import HeldOut, open_held_out
from mimo_train.flight.recorder import RECORDER, remove_old_starts
from mimo_train.hf.load import load_pretrained, load_start_adapters
from mimo_train.inputs.datasets import build_dataset
from mimo_train.inputs.mixture import Mixing
from mimo_train.inputs.padding import padding_of
from mimo_train.launch.processes import is_on_first_node
from mimo_train.launch.run_lock import LOCK_FILE, LONGEST_LOCK, ObjectLock, RunLock, require_seen
from mimo_train.layout.kernels import compile_remark
from mimo_train.layout.run import Run, warm_up_warnings
from mimo_train.logging import progress
from mimo_train.logging.console import Console
from mimo_train.logging.metrics_log import build_metrics_log
from mimo_train.logging.rank_log import show
from mimo_train.models.freeze import FreezeStages, GradientNeeds
from mimo_train.models.heads import ModelHook
from mimo_train.models.language_model import TrainedLogits
from mimo_train.models.layers import use_transformer_engine
from mimo_train.models.parameters import modules_of
from mimo_train.optim.factory import build_optimizer
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.parallel import device as devices
from mimo_train.parallel.collectives import agreed
from mimo_train.parallel.run_identity import (
    LONGEST_SIGHT,
    Start,
    require_one_config,
    require_one_folder,
)
from mimo_train.training.data_setup import DataEnd, count_texts, data_end, make_demo_shards, with_steps
from mimo_train.training.reference import References
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.bad_samples import BadSampleReport, StepCounts
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.feature_cache import Features
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Parts, build_parts, start_processes
from mimo_train.training.step.state import GlobalState, TrainState
from mimo_train.training.teacher.model import built_teacher
from mimo_train.training.teacher.steps import TaughtSet


@dataclass(frozen=True)
class Session:
    """Everything that the loop needs on this rank."""

    state: GlobalState
    parts: Parts
    votes: ExitVotes
    profiler: StepProfiler
    optimizer: ModuleOptimizer
    schedulers: ModuleSchedulers
    losses: StepLosses
    trained_logits: TrainedLogits | None
    """None unless `train.logits=learned`."""
    rerun: Rerun
    freeze_stages: FreezeStages
    data: StepIterator
    held_out_sets: tuple[HeldOut, ...]
    checkpointer: Checkpointer
    counts: StepCounts
    opened: ExitStack
    """The training and held-out data, and on rank 0 the locks of `run.dir` and `checkpoint.dir`."""

    @property
    def held_out(self) -> HeldOut | None:
        """The first held-out set other than the test set; None without one."""
        return next((each for each in self.held_out_sets if not each.is_test), None)

    @property
    def model(self) -> list[MegatronModule]:
        """The model chunks of this rank."""
        return self.parts.pipeline.model

    def close(self) -> None:
        """End threads, profilers and writers, also after a failure."""
        state = self.state
        with ExitStack() as ends:  # closes all, even if one fails
            ends.callback(self.opened.close)  # closed last
            for part in (state.metrics, state.console, self.checkpointer, self.profiler, self.data):
                ends.callback(part.close)


def setup(
    run: Run,
    votes: ExitVotes,
    *,
    start_time: float,
    store: dist.Store | None = None,
    pre_wrap_hook: ModelHook | None = None,
    samples_of: Callable[[Tokenizer], Samples] | None = None,
) -> Session:
    """Build a run, or resume it from its newest checkpoint. Collective over all ranks.

    Args:
        votes: this rank's reasons to exit.
        start_time: start of this job, in seconds since the epoch.
        store: for the rendezvous, instead of the address in the environment.
        samples_of: makes the samples instead of those of `data.shards`. The session's data then has no step.

    Raises:
        UserError, DataError: `run.dir`, data, tokenizer or checkpoint cannot be used, another process uses `run.dir`,
            or ranks have different configs or see different folders; with the config key.
    """
    kind, device = start_processes(run.cfg, store)
    opened = ExitStack()
    try:
        _claim_folder(run, opened)
        return _build(run, votes, kind, device, opened, start_time, pre_wrap_hook, samples_of)
    except BaseException:
        opened.close()
        raise


def _build(
    run: Run,
    votes: ExitVotes,
    kind: str,
    device: torch.device,
    opened: ExitStack,
    start_time: float,
    pre_wrap_hook: ModelHook | None,
    samples_of: Callable[[Tokenizer], Samples] | None,
) -> Session:
    RECORDER.to("demo")
    make_demo_shards(run)
    configured, (run, dataset) = run, with_steps(run) if samples_of is None else (run, None)
    cfg, train_state = run.cfg, TrainState()

    # Groups and model
    profiler = StepProfiler(cfg, run.dir, kind)  # before the model, so that the allocator's history includes it
    drawn = not loads_every_weight(run)
    teacher = built_teacher(run, kind, device)  # before the student, whose seeds and global groups stay
    parts = build_parts(run, kind, device, pre_wrap_hook, undrawn=parts_there(cfg) if drawn else all_parts(cfg))
    pipeline, groups = parts.pipeline, parts.pipeline.groups
    if teacher is not None:
        teacher.meet(run, parts)
    rerun = Rerun(cfg.train.rerun, cfg.train.log_interval)
    losses = StepLosses(
        cfg.train.loss_weights,
        groups,
        rerun.validate,
        needs_tokens=pipeline.router_losses.active,
        sources=source_names(cfg.data.mix),
        rare=cfg.traits.rare_metrics,
    )

    # Optimizer
    RECORDER.to("optimizer build")
    optimizer = build_optimizer(cfg, pipeline.model, groups)
    for chunk in pipeline.model[:1]:
        optimizer.attach(chunk.config)
    needs = GradientNeeds(run.layout, modules_of(pipeline.model), optimizer.releases, groups)
    freeze_stages = FreezeStages(cfg, optimizer.releases, optimizer.release, pipeline.shapes, needs)
    schedulers = ModuleSchedulers(cfg, optimizer)

    # Samples
    RECORDER.to("index")
    with agreed():
        if samples_of is not None:
            dataset = samples_of(parts.tokenizer)
        dataset = build_dataset(cfg, parts.tokenizer) if dataset is None else dataset
    opened.callback(dataset.close)
    padding = padding_of(cfg)
    mixing = Mixing(cfg, run.batch, dataset.order.sizes)
    taught = None if teacher is None else TaughtSet(teacher, dataset)
    if padding is not None and isinstance(dataset, ShardDataset):
        count_texts(run, dataset, lambda: any(votes.local()))
    if teacher is not None and taught is not None:
        opened.callback(taught.samples.close)
        if taught.padding is not None and isinstance(taught.samples, ShardDataset):
            count_texts(teacher.run, taught.samples, lambda: any(votes.local()))

    # Resume
    rows = embedding_rows(cfg.llm, parts.tokenizer.vocab_size)
    checkpointer = Checkpointer(
        run,
        pipeline.model,
        optimizer,
        schedulers,
        train_state,
        rerun,
        Fingerprints.of(dataset, parts.tokenizer.vocabulary_fingerprint),
        partial(load_pretrained, cfg, pipeline.model, groups, rows),
        partial(load_start_adapters, cfg, pipeline.model, rows),
        mixing,
        drawn=drawn,
    )
    RECORDER.to("load")
    resumed_from = checkpointer.resume()
    if not train_state.consumed_train_tokens:  # a checkpoint from before they were counted
        train_state.consumed_train_tokens = train_state.consumed_train_samples * cfg.data.sequence_length
    RECORDER.to("loop")

    # Data from the step at which the run resumes, and held-out data
    votes.meet(devices.rendezvous_store())
    dataset.set_phases(mixing.phases)
    with agreed():
        stops = data_end(run, dataset, train_state) if samples_of is None else None
    features = Features(cfg, pipeline.model, use_transformer_engine(kind))
    features.serve(dataset)
    references = References(run, pipeline, train_state, votes.of_evaluations)
    references.serve(dataset, padding, "the training samples")
    RECORDER.to("loop")
    reading: dict[str, Any] = {
        "consumed": train_state.consumed_train_samples,
        "steps": (cfg.train.iters if stops is None else stops.step) - train_state.step if samples_of is None else 0,
        "size_at": run.batch.size_at,
        "gives_up": never if features.prefetch_together else votes.gives_up,
    }
    loader = open_loader(run, groups, dataset, padding=padding, **reading)
    opened.callback(loader.close)
    learned = cfg.train.logits == "learned"
    options: dict[str, Any] = {"trains": True, "votes": votes.before_a_step}
    if taught is None:
        data = StepIterator(loader, pipeline, learned_logits=learned, **options)
    else:
        taught.samples.set_phases(mixing.phases)
        data = taught.steps(loader, reading, **options)
    prefetcher = features.prefetcher(data)
    if prefetcher is not None:
        pipeline.work_ahead(prefetcher.one, prefetcher.all)
    taught_set = None if teacher is None else partial(TaughtSet, teacher)
    held_out_sets = open_held_out(run, pipeline, parts.tokenizer, features, votes.of_evaluations, taught_set)
    for held_out in held_out_sets:
        opened.callback(held_out.dataset.close)
        references.serve_held_out(held_out)
    RECORDER.to("loop")

    # Log, opened last: a failure before it keeps the files of an earlier start
    state = _open_log(run, configured, train_state, start_time, resumed_from, checkpointer, stops)
    report = BadSampleReport(run.dir, run.layout.logging_rank, state.console.message)
    for held_out in held_out_sets:
        held_out.tell_of_bad_samples_by(report)
    return Session(
        state=state,
        parts=parts,
        votes=votes,
        profiler=profiler,
        optimizer=optimizer,
        schedulers=schedulers,
        losses=losses,
        trained_logits=TrainedLogits(pipeline.model) if learned else None,
        rerun=rerun,
        freeze_stages=freeze_stages,
        data=data,
        held_out_sets=held_out_sets,
        checkpointer=checkpointer,
        counts=StepCounts(train_state, dataset, report, cfg.train.max_empty_steps, device),
        opened=opened,
    )


def _claim_folder(run: Run, opened: ExitStack) -> None:
    """Lock `run.dir` and `checkpoint.dir`, and check that all ranks were started alike. Collective over all ranks."""
    RECORDER.to("lock")
    saves = run.checkpoints
    start, longest = Start.of(run.cfg), 30 * run.cfg.run.timeout_minutes
    try:
        with agreed(start) as starts:
            make_folder(run.dir)
            if dist.get_rank() == 0:
                opened.callback(RunLock(run.dir, min(LONGEST_LOCK, longest), start.mark).close)
                remove_old_starts(run.dir)
                if isinstance(saves, Url):
                    opened.callback(ObjectLock(saves, start.mark).close)
    except UserError:
        RECORDER.discard()  # the folder belongs to another run
        raise
    require_one_config(starts)
    require_one_folder(run.dir / LOCK_FILE, starts, min(LONGEST_SIGHT, longest))
    if isinstance(saves, Url):
        with agreed():
            require_seen(saves, starts[0].mark)


def _open_log(
    run: Run,
    configured: Run,
    train_state: TrainState,
    start_time: float,
    resumed_from: Place | None,
    checkpointer: Checkpointer,
    stops: DataEnd | None,
) -> GlobalState:
    """Return the run's state, with the log open on the logging rank, and report how the run starts. `configured` is the
    run before `train.epochs` was resolved; `stops` is where the data ends it."""
    data_ends = None if stops is None else stops.step
    state = GlobalState(run, train_state, start_time=start_time, data_ends=data_ends)
    rank, step = dist.get_rank(), train_state.step
    writer = run.layout.logging_rank
    if rank == 0 and not is_on_first_node(run.layout, writer):
        logs = f"mimo-train logs {shlex.quote(str(run.dir))} --rank {writer} --follow"
        show(f"rank {writer}, which computes the loss, prints the progress on another node; {logs} shows it here")
    if rank != writer:
        return state
    (run.dir / "config.yaml").write_text(to_yaml(configured.cfg))
    metrics = build_metrics_log(run.cfg, run.dir, resumed_step=step)
    console = Console(state.last_step, step)
    flops = train_state.floating_point_operations_so_far
    progress.job_started(run.dir, world_size=run.layout.world_size, step=step, flops=flops)
    for loaded in checkpointer.loaded:
        console.message(str(loaded))
    for damaged in checkpointer.set_aside:
        progress.append(run.dir, "damaged", path=damaged.folder, why=damaged.damage)
        console.message(str(damaged))
    if stops is not None:
        console.message(str(stops))
    for warning in warm_up_warnings(run.cfg, state.last_step):
        console.message(f"warning: {warning}")
    if step < state.last_step and (remark := compile_remark(run.cfg)):
        console.message(remark)
    if resumed_from is not None:
        console.message(f"resumed from {resumed_from} at step {step}")
    if checkpointer.unread_weights:
        console.message(f"warning: {checkpointer.unread_weights}")
    if changes := checkpointer.config_changes:
        console.message(f"warning: results will differ from the original run from this step on: {changes}")
    return replace(state, metrics=metrics, console=console)
