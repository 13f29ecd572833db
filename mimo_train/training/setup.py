"""Build everything the loop needs from a run: processes, groups, model, optimizer, data, loggers, resume."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from data.errors import DataError
from data.pipeline import Dataset, never
from data.storage.url import Url
from mimo_train.checkpoint.checkpointer import Checkpointer
from mimo_train.checkpoint.frozen_base import loads_every_weight
from mimo_train.checkpoint.local_shards import Fingerprints
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
from mimo_train.inputs.inputs import build_dataset
from mimo_train.inputs.mixture import Mixing
from mimo_train.inputs.padding import padding_of
from mimo_train.launch.object_lock import ObjectLock, require_seen
from mimo_train.launch.processes import is_first_of_node
from mimo_train.launch.run_lock import LOCK_FILE, LONGEST_LOCK, RunLock
from mimo_train.layout.run import Run
from mimo_train.models.heads import ModelHook
from mimo_train.models.language.gpt import TrainedLogits
from mimo_train.models.layers import use_transformer_engine
from mimo_train.models.names import modules_of
from mimo_train.optim.factory import build_optimizer
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import FreezeStages, GradientNeeds, ModuleSchedulers
from mimo_train.parallel import device as devices
from mimo_train.parallel.bridge.shapes import StepShapes
from mimo_train.parallel.collective_errors import agreed
from mimo_train.parallel.metric_reduction import StepSum
from mimo_train.parallel.run_identity import (
    LONGEST_SIGHT,
    Start,
    require_one_config,
    require_one_folder,
    require_own_devices,
)
from mimo_train.training.data_setup import count_texts, data_end, with_steps
from mimo_train.training.opening import open_state
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.bad_samples import BadSampleCount, BadSampleReport, EmptySteps
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.feature_cache import Features
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.parts import Parts, build_parts, start_processes
from mimo_train.training.step.schedule import Pipeline
from mimo_train.training.step.state import GlobalState, TrainState


@dataclass(frozen=True)
class Session:
    """Everything that the loop needs on this rank."""

    state: GlobalState
    parts: Parts
    profiler: StepProfiler
    optimizer: ModuleOptimizer
    schedulers: ModuleSchedulers
    losses: StepLosses
    rerun: Rerun
    freeze_stages: FreezeStages
    data: StepIterator
    held_out_sets: tuple[HeldOut, ...]
    checkpointer: Checkpointer
    bad_samples: BadSampleCount
    empty_steps: EmptySteps
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
        with ExitStack() as ends:  # all of them, whichever fails
            ends.callback(self.opened.close)  # the last of all
            for part in (state.metrics, state.console, self.checkpointer, self.profiler, self.data):
                ends.callback(part.close)


def setup(
    run: Run,
    votes: ExitVotes,
    *,
    start_time: float,
    store: dist.Store | None = None,
    pre_wrap_hook: ModelHook | None = None,
) -> Session:
    """Build a run, or continue it from its newest checkpoint. Collective over all ranks.

    Args:
        votes: this rank's reasons to exit.
        start_time: of this job, in seconds since the epoch.
        store: for the rendezvous, instead of the address in the environment.
        pre_wrap_hook: changes the model chunks before they are wrapped for data parallelism.

    Raises:
        UserError, DataError: `run.dir`, data, tokenizer or checkpoint cannot be used, another process uses `run.dir`,
            or ranks were started with different configs or see different folders; with the config key.
    """
    kind, device = start_processes(run.cfg, store)
    opened, saves = ExitStack(), run.checkpoints
    RECORDER.to("lock")
    start, longest = Start.of(run.cfg, devices.identity(device)), 30 * run.cfg.run.timeout_minutes
    try:
        try:
            with agreed(start) as starts:
                make_folder(run.dir)
                if dist.get_rank() == 0:
                    opened.callback(RunLock(run.dir, min(LONGEST_LOCK, longest), start.mark).close)
                    remove_old_starts(run.dir)
                    if isinstance(saves, Url):
                        opened.callback(ObjectLock(saves, start.mark).close)
        except UserError:
            RECORDER.discard()  # the folder is another run's
            raise
        require_one_config(run.cfg, starts)
        require_own_devices(starts)
        require_one_folder(run.dir / LOCK_FILE, starts, min(LONGEST_SIGHT, longest))
        if isinstance(saves, Url):
            with agreed():
                require_seen(saves, starts[0].mark)
        return _build(run, votes, kind, device, opened, start_time, pre_wrap_hook)
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
) -> Session:
    RECORDER.to("demo")
    make_demo_shards(run)
    given, (run, dataset) = run, with_steps(run)
    cfg, train_state = run.cfg, TrainState()
    drawn = not loads_every_weight(run)
    profiler = StepProfiler(cfg, run.dir, kind)  # before the model: the allocator's history holds all of it
    parts = build_parts(run, kind, device, pre_wrap_hook, undrawn=parts_there(cfg) if drawn else all_parts(cfg))
    pipeline, step_sum, groups = parts.pipeline, parts.step_sum, parts.pipeline.groups
    RECORDER.to("optimizer build")
    optimizer = build_optimizer(cfg, pipeline.model, groups)
    optimizer.attach(pipeline.model[0].config)
    needs = GradientNeeds(run.layout, modules_of(pipeline.model), optimizer.releases, groups)
    freeze_stages = FreezeStages(cfg, optimizer, partial(_announce_needs, pipeline.shapes, needs))
    schedulers = ModuleSchedulers(cfg, optimizer)
    rerun = Rerun(cfg.train.rerun, cfg.train.log_interval)
    losses = StepLosses(
        cfg.train.loss_weights,
        groups,
        step_sum,
        rerun.validate,
        needs_tokens=pipeline.router_losses.active,
        sources=source_names(cfg.data.mix),
    )
    RECORDER.to("index")
    with agreed():
        dataset = build_dataset(cfg, parts.tokenizer) if dataset is None else dataset
    opened.callback(dataset.close)
    padding = padding_of(cfg)
    mixing = Mixing(cfg, run.batch, dataset.source_sizes)
    if padding is not None and isinstance(dataset, Dataset):
        count_texts(run, dataset, lambda: any(votes.own()))
    saved = (pipeline.model, optimizer, schedulers, train_state, rerun)
    rows = embedding_rows(cfg.llm, parts.tokenizer.vocab_size)
    read_pretrained = partial(load_pretrained, cfg, pipeline.model, groups, rows)
    fingerprints = Fingerprints.of(dataset, parts.tokenizer.vocabulary_fingerprint)
    read_adapters = partial(load_start_adapters, cfg, pipeline.model, rows)
    checkpointer = Checkpointer(run, *saved, fingerprints, read_pretrained, read_adapters, mixing, drawn=drawn)
    RECORDER.to("load")
    resumed_from = checkpointer.resume()
    if not train_state.consumed_train_tokens:  # a checkpoint of a time when they were not counted
        train_state.consumed_train_tokens = train_state.consumed_train_samples * cfg.data.sequence_length
    RECORDER.to("loop")
    votes.meet(devices.meeting)
    dataset.set_phases(mixing.phases)
    with agreed():
        stops = data_end(run, dataset, train_state)
    features = Features(cfg, pipeline.model, use_transformer_engine(kind))
    features.serve(dataset)
    loader = open_loader(
        run,
        groups,
        dataset,
        consumed=train_state.consumed_train_samples,
        steps=(cfg.train.iters if stops is None else stops.step) - train_state.step,
        size_at=run.batch.size_at,
        padding=padding,
        gives_up=never if features.prefetch_together else votes.gives_up,
    )
    opened.callback(loader.close)
    learned = cfg.train.logits == "learned"
    data = StepIterator(loader, pipeline, step_sum, learned_logits=learned, votes=votes.before_a_step)
    _open_sections(run, step_sum, pipeline, losses, votes, train_state, data, checkpointer)
    # The votes first, as `exit.agreed_votes` reads them, and the save last, as `Checkpointer.hear` does.
    optimizer.passengers = lambda: torch.cat([step_sum.sum_of("votes"), step_sum.sum_of("save in flight")])
    prefetcher = features.prefetcher(data)
    if prefetcher is not None:
        pipeline.work_ahead(prefetcher.one, prefetcher.all)
    held_out = open_held_out(run, pipeline, parts.tokenizer, features, votes.of_evaluations)
    for one in held_out:
        opened.callback(one.dataset.close)
    # The log is opened last: what fails before leaves the files of an earlier start as they are.
    state = open_state(run, given, train_state, start_time, resumed_from, checkpointer, stops)
    report = BadSampleReport(run.dir, run.layout.logging_rank, state.console.message)
    for one in held_out:
        one.tell_of_bad_samples_by(report)
    return Session(
        state=state,
        parts=parts,
        profiler=profiler,
        optimizer=optimizer,
        schedulers=schedulers,
        losses=losses,
        rerun=rerun,
        freeze_stages=freeze_stages,
        data=data,
        held_out_sets=held_out,
        checkpointer=checkpointer,
        bad_samples=BadSampleCount(train_state, dataset, report, device),
        empty_steps=EmptySteps(train_state, cfg.train.max_empty_steps, step_sum, device),
        opened=opened,
    )


def _open_sections(
    run: Run,
    step_sum: StepSum,
    pipeline: Pipeline,
    losses: StepLosses,
    votes: ExitVotes,
    train_state: TrainState,
    data: StepIterator,
    checkpointer: Checkpointer,
) -> None:
    """Open the sections of the all-reduce at the end of every backward pass, in the same order on every rank; sums are
    read by section name."""
    samples = run.batch.global_batch_size
    step_sum.open("tokens", 1, pipeline.own_tokens)
    step_sum.open("votes", votes.ALL, lambda: votes.numbers(train_state.step + 1))
    step_sum.open("save in flight", checkpointer.NUMBER, checkpointer.own)
    step_sum.open("losses", losses.numbers, losses.own)
    step_sum.open("bad samples", samples, data.own_bad_samples)
    if pipeline.router_losses.active:
        step_sum.open(pipeline.router_losses.SECTION, pipeline.router_losses.numbers, pipeline.router_losses.own)
    if data.weighs:
        step_sum.open("learned", samples, data.own_learned)
    if run.cfg.train.logits == "learned":
        step_sum.open("logits", 1, TrainedLogits(pipeline.model).own)


def make_demo_shards(run: Run) -> None:
    """Generate the demo shards of `data.demo` if they are missing, on the first rank of each node; the others wait.

    Raises:
        DataError: they cannot be made there; on every rank.
    """
    data = run.cfg.data
    if not data.demo:
        return
    from data.demo.make import ensure_demo

    folder = Path(data.shards).parent
    with agreed():
        try:
            if is_first_of_node(run.layout, dist.get_rank()):
                ensure_demo(folder, data.demo)
        except OSError as error:
            raise DataError(
                f"data.demo: cannot make the {data.demo} demo in {folder} ({error}): free space there, or set "
                "data.shards=FOLDER/train data.validation_shards=FOLDER/held_out for a FOLDER that can be written"
            ) from error


def _announce_needs(shapes: StepShapes, needs: GradientNeeds, step: int) -> None:
    shapes.needs = needs.at(step)
