"""Build everything the loop needs from a run: processes, groups, model, optimizer, data, loggers, resume."""

import os
import random
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule

from data.pipeline import Dataset, never
from data.storage.url import Url
from data.tokens import Tokenizer
from mimo_train.checkpoint.checkpointer import Checkpointer, Fingerprints
from mimo_train.checkpoint.every_weight import loads_every_weight
from mimo_train.checkpoint.hf.load import load_pretrained, load_start_adapters
from mimo_train.config.fault import ConfigError, UserError
from mimo_train.config.pretrained.fill_in import all_parts, parts_there
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.diagnose.profiling import StepProfiler
from mimo_train.diagnose.rerun import Rerun
from mimo_train.evaluation.bad_sample_report import BadSampleReport
from mimo_train.evaluation.held_out import HeldOut, open_held_out
from mimo_train.flight.recorder import RECORDER, remove_old_starts
from mimo_train.launch.object_lock import ObjectLock, require_seen
from mimo_train.launch.output import show
from mimo_train.launch.processes import is_first_of_node
from mimo_train.launch.run_lock import LOCK_FILE, LONGEST_LOCK, RunLock
from mimo_train.metrics.stopwatch import Stopwatch
from mimo_train.model.build import build_model
from mimo_train.model.heads import ModelHook
from mimo_train.model.layers import use_transformer_engine
from mimo_train.model.llm.gpt import TrainedLogits
from mimo_train.model.names import modules_of
from mimo_train.model.seeds import seed_for
from mimo_train.optim.factory import build_optimizer
from mimo_train.optim.freeze_stages import FreezeStages, GradientNeeds
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.parallel import device as devices
from mimo_train.parallel.agreement import agreed
from mimo_train.parallel.alone import return_at_once
from mimo_train.parallel.bridge.shapes import StepShapes
from mimo_train.parallel.groups import RunGroups, build_groups
from mimo_train.parallel.one_run import (
    LONGEST_SIGHT,
    Start,
    require_one_config,
    require_one_folder,
    require_own_devices,
)
from mimo_train.parallel.recorded import record_messages
from mimo_train.parallel.step_sum import StepSum
from mimo_train.plan.inputs import build_dataset, placeholders_of, tokenizer_of
from mimo_train.plan.mixture import Mixing
from mimo_train.plan.padding import padding_of
from mimo_train.plan.parameters import embedding_rows, vocabulary_faults
from mimo_train.plan.run import Run
from mimo_train.plan.run_dir import make_folder
from mimo_train.step.batches import StepIterator, open_loader
from mimo_train.step.counted_texts import count_texts
from mimo_train.step.feature_cache import Features
from mimo_train.step.losses import StepLosses
from mimo_train.step.schedule import Pipeline
from mimo_train.step.state import GlobalState, TrainState
from mimo_train.training.bad_sample_count import BadSampleCount
from mimo_train.training.data_end import data_end, with_steps
from mimo_train.training.empty_steps import EmptySteps
from mimo_train.training.exit import ExitVotes
from mimo_train.training.opening import open_state


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a forward pass needs, without an optimizer."""

    tokenizer: Tokenizer
    pipeline: Pipeline
    """With the model, the process groups and the device."""
    step_sum: StepSum
    stopwatch: Stopwatch
    profiler: StepProfiler


@dataclass(frozen=True)
class Session:
    """Everything that the loop needs on this rank."""

    state: GlobalState
    parts: Parts
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
    """The training data, and on rank 0 the locks of `run.dir` and `checkpoint.dir`."""

    @property
    def held_out(self) -> HeldOut | None:
        """The first held-out set, if there is one."""
        return next(iter(self.held_out_sets), None)

    @property
    def model(self) -> list[MegatronModule]:
        """The model chunks of this rank."""
        return self.parts.pipeline.model

    def close(self) -> None:
        """End threads, profilers and writers, also after a failure."""
        state, parts = self.state, self.parts
        with ExitStack() as ends:  # all of them, whichever fails
            ends.callback(self.opened.close)  # the last of all
            for part in (state.metrics, state.console, self.checkpointer, parts.profiler, self.data):
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
    dataset, padding = dataset or build_dataset(cfg, parts.tokenizer), padding_of(cfg)
    opened.callback(dataset.close)
    mixing = Mixing(cfg, run.batch, dataset.source_sizes)
    if padding is not None and isinstance(dataset, Dataset):
        count_texts(run, dataset)
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
    # The log is opened last: what fails before leaves the files of an earlier start as they are.
    state = open_state(run, given, train_state, start_time, resumed_from, checkpointer, stops)
    report = BadSampleReport(run.dir, run.layout.logging_rank, state.console.message)
    for one in held_out:
        one.tell_of_bad_samples_by(report)
    return Session(
        state=state,
        parts=parts,
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
    step_sum.open("votes", votes.ALL, lambda: votes.numbers(train_state.step + 1, data.own_digest()))
    step_sum.open("save in flight", checkpointer.NUMBER, checkpointer.own)
    step_sum.open("losses", losses.numbers, losses.own)
    step_sum.open("bad samples", samples, data.own_bad_samples)
    if pipeline.router_losses.active:
        step_sum.open(pipeline.router_losses.SECTION, pipeline.router_losses.numbers, pipeline.router_losses.own)
    if data.weighs:
        step_sum.open("learned", samples, data.own_learned)
    if run.cfg.train.logits == "learned":
        step_sum.open("logits", 1, TrainedLogits(pipeline.model).own)


def start_processes(cfg: ConfigContainer, store: dist.Store | None = None) -> tuple[str, torch.device]:
    """Prepare this process for its device and join the others, over `store` if it is given.

    Returns:
        The kind of device, and the device.
    """
    chosen = devices.choose(cfg.run.device, *(int(os.environ.get(*each)) for each in _OF_THIS_MACHINE))
    kind, device = chosen.kind, devices.install(chosen.kind, chosen.index)
    _remark(cfg, chosen)
    record_messages()
    return_at_once()
    if kind == "cuda":
        RECORDER.queued()
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        if store is None and os.environ["WORLD_SIZE"] == "1":
            # There is nobody to meet: an address that something else has left in the environment is not waited for.
            store = dist.HashStore()
        RECORDER.to("join")
        devices.init_process_group(kind, cfg.run.timeout_minutes, store)
    return kind, device


_OF_THIS_MACHINE = (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _remark(cfg: ConfigContainer, chosen: devices.Choice) -> None:
    """Say on the first rank what there is to say about the device."""
    if os.environ.get("RANK", "0") != "0":
        return
    overlaps = any(module.layout.tp * module.layout.cp > 1 for module in cfg.modules.values())
    for remark in devices.remarks(overlaps) if chosen.kind == "cuda" else filter(None, [chosen.remark]):
        show(remark)


def build_parts(
    run: Run,
    kind: str,
    device: torch.device,
    pre_wrap_hook: ModelHook | None = None,
    *,
    undrawn: Set[tuple[str, str]] = frozenset(),
) -> Parts:
    """Groups, model and pipeline of a run; weights are initial, but for those of `undrawn` (see `build_model`).
    Collective over all ranks."""
    RECORDER.to("groups")
    cfg, groups, tokenizer = run.cfg, build_groups(run.layout, run.cfg.run.timeout_minutes), tokenizer_of(run.cfg)
    if faults := list(vocabulary_faults(cfg.llm, tokenizer.text_size)):
        raise ConfigError(faults)
    profiler = StepProfiler(cfg, run.dir, kind)  # before the model: the allocator's history holds all of it
    _seed(cfg, groups)
    RECORDER.to("model")
    model = build_model(
        cfg,
        run.layout,
        groups,
        vocab_size=tokenizer.vocab_size,
        special_token_ids={name: tokenizer.placeholder_id(token) for name, token in placeholders_of(cfg).items()},
        device=device,
        te=use_transformer_engine(kind),
        pre_wrap_hook=pre_wrap_hook,
        undrawn=undrawn,
    )
    _seed(cfg, groups)
    step_sum, stopwatch = StepSum(device), Stopwatch(cuda=kind == "cuda")
    pipeline = Pipeline(run, groups, model, device, step_sum, stopwatch)
    return Parts(tokenizer, pipeline, step_sum, stopwatch, profiler)


def make_demo_shards(run: Run) -> None:
    """Generate the demo shards of `data.demo` if they are missing, on the first rank of each node; the others wait."""
    data = run.cfg.data
    if not data.demo:
        return
    from data.demo.make import ensure_demo

    if is_first_of_node(run.layout, dist.get_rank()):
        ensure_demo(Path(data.shards).parent, data.demo)
    dist.barrier()


def _announce_needs(shapes: StepShapes, needs: GradientNeeds, step: int) -> None:
    shapes.needs = needs.at(step)


def _seed(cfg: ConfigContainer, groups: RunGroups) -> None:
    """Seed every generator: dropout differs between data- and context-parallel ranks, stages and modules."""
    name, pgs = next(iter(groups.collections.items()))
    place = (name, pgs.dp.rank(), pgs.pp.rank(), *([pgs.cp.rank()] if pgs.cp.size() > 1 else []))
    seed = seed_for(cfg.run.seed, "rank", *place) % 2**31
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed,
        force_reset_rng=True,
        tp_rank=pgs.tp.rank(),
        ep_rank=pgs.ep.rank(),
        etp_rank=pgs.expt_tp.rank(),
    )
