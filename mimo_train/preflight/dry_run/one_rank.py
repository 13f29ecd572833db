"""One rank of a run without the others and without a device: set-up, steps and evaluation."""

import copy
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from data.samples.text_lengths import TextLengths
from data.storage.url import Place
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_distill import DISTILL, SFT, DistillConfig
from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig
from mimo_train.layout.batch import Batch
from mimo_train.layout.run import Run
from mimo_train.preflight.dry_run import fake_cuda, fake_tensors, fake_world, fused
from mimo_train.preflight.dry_run.counts import GRADIENTS, OPTIMIZER, WEIGHTS, Counts
from mimo_train.preflight.dry_run.fake_tensors import FakeCounts
from mimo_train.preflight.dry_run.observation import Kind, RankResult

STEPS = 2
"""The first step creates the optimizer states; the second one is like all that follow."""


def device_kind(cfg: ConfigContainer) -> str:
    """Return the kind of device of a dry run: CUDA, unless the config sets the CPU."""
    return "cpu" if cfg.run.device == "cpu" else "cuda"


def trial_run(run: Run, folder: Path) -> Run:
    """Return the trial run: a few steps from initial weights, into another folder, without sinks. Its steps are like
    the last ones of the run, which take most: full batch size, and everything trained that is trained by then."""
    cfg, iters = copy.deepcopy(run.cfg), run.cfg.train.iters
    cfg.run.dir, cfg.run.device = str(folder), device_kind(cfg)
    cfg.train.iters, cfg.train.epochs, cfg.data.workers = STEPS, 0, 0
    cfg.train.rampup_batch_size = []
    if cfg.train.task == DISTILL:  # the student alone
        cfg.train.task, cfg.distill = SFT, DistillConfig()
    cfg.train.compile = "none"  # no compiler takes tensors of a fake device
    for module in cfg.modules.values():
        module.compile = ""
        later = {name: step for name, step in module.freeze_until.items() if step}
        # A part that the run unfreezes is unfrozen after the first step here.
        module.freeze_until = {name: 1 if step < iters or not iters else step for name, step in later.items()}
        if 1 in module.freeze_until.values():
            cfg.train.iters = STEPS + 1
    # One step of an evaluation is like the next.
    cfg.train.eval_samples, cfg.train.report_samples = cfg.train.global_batch_size, min(cfg.train.report_samples, 1)
    cfg.train.skip_iters, cfg.train.exit_interval, cfg.train.callbacks = [], 0, []
    cfg.checkpoint.dir, cfg.checkpoint.weights, cfg.checkpoint.resume = "", "", "never"
    cfg.log = replace(cfg.log, tensorboard=False, wandb=False, mlflow=False, comet=False)
    for module in cfg.modules.values():
        module.feature_cache = FeatureCacheConfig()
    cfg.checkpoint.load_modules, cfg.profiling = {}, ProfilingConfig()
    return replace(run, cfg=cfg, batch=Batch.of(cfg))


def run_rank(run: Run, kind: Kind) -> RankResult:
    """Set up, train and evaluate as one rank. Changes torch for the rest of this process."""
    began = time.monotonic()
    # A forked process makes its thread pool anew at the first call. If two autograd threads make that call at once,
    # one finds no pool and the process aborts (torch 2.11: "Invalid thread pool!"). So one thread makes it here.
    torch.set_num_threads(torch.get_num_threads())
    device = device_kind(run.cfg)
    import_program()
    with TemporaryDirectory(prefix="mimo-dry-run-") as folder, ExitStack() as stack:
        run = trial_run(run, Path(folder))
        fake_world.join(kind.rank, run.layout.world_size, run.layout.ranks_per_node)
        counts = FakeCounts(fake_cuda.is_on_device if device == "cuda" else _is_on_cpu)
        names = _install(device, counts)
        fake_tensors.enter(stack, counts)
        if names is not None:
            stack.enter_context(names)
        fake_tensors.install_attention(device)
        fake_world.balance_experts(counts)
        fused.install(counts)
        fake_world.install_gradient_needs(run)
        skip_checkpoints()
        choose_layers(run.cfg)
        observed = observe(run, counts)
    made = distributed_c10d._world.pg_group_ranks
    groups = [("world" if group is dist.group.WORLD else group.group_desc, len(made[group])) for group in made]
    return RankResult(
        kind=kind,
        device=device,
        groups=groups,
        seconds=time.monotonic() - began,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **observed,
    )


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def import_program() -> None:
    """Import the whole program before anything of torch is replaced: torch.compile, which Megatron-Core imports,
    distinguishes torch functions by identity."""
    import mimo_train.training.pretrain  # noqa: F401


def _install(device: str, counts: Counts) -> Any:
    from mimo_train.parallel import device as devices

    # Megatron-Core compiles small fusions for the GPU, but no compiler takes tensors of a fake device.
    torch.compiler.set_stance("force_eager")
    if device == "cuda":
        return fake_cuda.install(counts)
    devices.install("cpu")
    return None


def choose_layers(cfg: ConfigContainer) -> None:
    """Use torch layers without fp8: Transformer Engine's need a GPU."""
    from mimo_train.training import setup as setting_up
    from mimo_train.training.step import pipeline

    setting_up.use_transformer_engine = pipeline.use_transformer_engine = lambda kind: False
    cfg.train.fp8 = "none"
    for module in cfg.modules.values():
        module.fp8 = ""


def skip_checkpoints() -> None:
    """Start with the weights of the set-up, and save nothing, for the rest of this process."""
    from mimo_train.checkpoint.checkpointer import Checkpointer

    def save(self: Checkpointer, *_: Any, **__: Any) -> Place:
        return self._run.dir

    Checkpointer.resume = lambda self: None  # type: ignore[method-assign]
    Checkpointer.save = Checkpointer.begin = save  # type: ignore[method-assign]


def observe(run: Run, counts: Counts) -> dict[str, Any]:
    """Set up and train under `counts`, on tensors of any kind; returns fields of `RankResult`."""
    from data.loader import StepLoader
    from data.samples.shard_dataset import ShardDataset
    from encoders.native.whisper import model as whisper
    from mimo_train.launch.exit_signal import ExitSignal
    from mimo_train.training import setup as setting_up
    from mimo_train.training.callbacks import Callback, Callbacks
    from mimo_train.training.loop import train
    from mimo_train.training.pretrain import default_forward_step
    from mimo_train.training.reference import References
    from mimo_train.training.shutdown import ExitVotes

    last: dict[str, Any] = {}
    evaluated: list[int] = []

    class Steps(Callback):
        def on_step_start(self, state):  # type: ignore[no-untyped-def]
            counts.reset()

        def on_step_end(self, state, result):  # type: ignore[no-untyped-def]
            last.update(
                flops=counts.flops,
                messages={
                    f"{name} over {size}": (number, nbytes)
                    for (name, size), (number, nbytes) in sorted(counts.messages.items())
                },
                waits=_by_line(counts.waits),
                waits_inside=_by_line(counts.waits_inside),
            )
            counts.memory.relabel(_states(session.optimizer), OPTIMIZER)

        def on_evaluation(self, state, values):  # type: ignore[no-untyped-def]
            evaluated.append(1)

    setting_up.require_one_folder = lambda *_: None  # rank 0, which would have written into it, does not exist
    setting_up.count_texts = fake_tensors.outside(_count_texts)
    References.serve = fake_tensors.outside(_serve_zeros)  # type: ignore[method-assign]
    setting_up.make_demo_shards = fake_tensors.outside(setting_up.make_demo_shards)
    StepLoader.__next__ = fake_tensors.outside(StepLoader.__next__)  # type: ignore[method-assign]
    whisper.mel_filters = fake_tensors.outside(whisper.mel_filters)
    for name in ("read_text", "read_media"):
        setattr(ShardDataset, name, fake_tensors.outside(getattr(ShardDataset, name)))
    session = setting_up.setup(run, ExitVotes(ExitSignal(), 0, 0), start_time=time.time())
    try:
        counts.memory.relabel((parameter for chunk in session.model for parameter in chunk.parameters()), WEIGHTS)
        for buffer in _buffers(session.model):
            counts.memory.relabel([buffer.grad_data], GRADIENTS)
        counts.memory.relabel(_states(session.optimizer), OPTIMIZER)
        counts.memory.end_setup()
        pipeline = session.parts.pipeline
        pipeline.run = counts.inside(pipeline.run)  # type: ignore[method-assign]
        layers = fused.LayerKernels(session.model, counts)
        train(session, default_forward_step(run.cfg), Callbacks([Steps()]))
        counts.memory.finish()
        peak, at_peak = counts.memory.peak, counts.memory.at_peak
        last["kernels"] = layers.count()
    finally:
        session.close()
    categories: dict[str, int] = {}
    for (category, _), size in at_peak.items():
        categories[category] = categories.get(category, 0) + size
    lines = [(category, line, size) for (category, line), size in at_peak.most_common()]
    return {
        **last,
        "peak": peak,
        "categories": categories,
        "lines": lines,
        "evaluated": bool(evaluated),
    }


def _count_texts(run: Run, dataset: Any, _should_stop: Any) -> None:
    """Count on this rank: in a run rank 0 counts for all."""
    lengths = TextLengths(dataset)
    for _ in lengths.build():
        pass
    TextLengths(dataset).serve()


def _serve_zeros(references: Any, dataset: Any, *_: Any) -> None:
    """Give a dataset reference values without a pass over its samples."""
    if references.needed:
        shape = sum(part.rows for part in dataset.order.parts), dataset.answers
        dataset.reference = np.zeros(shape, dtype=np.float32)


def _by_line(waits: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{what} at {line}": number for (what, line), number in waits.most_common()}


def _buffers(model: list) -> Iterator[Any]:
    from mimo_train.models.parameters import modules_of
    from mimo_train.models.sharding import ShardedModule

    for chunks in modules_of(model).values():
        for chunk in chunks:
            if not isinstance(chunk, ShardedModule):
                yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _states(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield master copies and moments."""
    for inner in optimizer.inner():
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                states = inner.optimizer.state.get(parameter, {})
                yield from (value for value in states.values() if isinstance(value, torch.Tensor))
        for copies in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(inner, copies, []):
                yield from (each for each in group if isinstance(each, torch.Tensor))
