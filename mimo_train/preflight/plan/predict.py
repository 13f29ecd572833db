"""The predicted time of a step of a candidate, from the costs of its stages and the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.devices import Links
from mimo_train.estimate.schedule import Part, Stage, ends, ends_on_cores, least_seconds
from mimo_train.layout.batch import pack_length
from mimo_train.preflight.plan.candidate import Candidate, ranks_of
from mimo_train.preflight.plan.costs import Costs, StageCost
from mimo_train.preflight.plan.counts import Counts, Load, Loads


class RankWork(NamedTuple):
    """The work of the ranks of a pipeline stage, in seconds per microbatch unless stated otherwise."""

    modules: tuple[str, ...]
    """Modules on these ranks."""
    stage: int
    """Stage of the first of these modules, from 0."""
    stages: int
    ranks: int
    forward: float
    backward: float
    messages: float
    """Messages of both passes that block matmuls."""
    gradients: float
    """Reduction of gradients after the last microbatch of a step."""
    update: float
    """Optimizer update of a step."""

    @classmethod
    def of(
        cls,
        modules: tuple[str, ...],
        stage: int,
        layout: LayoutConfig,
        costs: Sequence[StageCost],
        *,
        overlapped: bool = False,
    ) -> "RankWork":
        """Return the work of modules that run one after the other; `overlapped`: backward reduces gradients."""
        forward = sum(cost.forward + cost.forward_messages for cost in costs)
        backward = sum(cost.backward + cost.backward_messages for cost in costs)
        messages = sum(cost.forward_messages + cost.backward_messages for cost in costs)
        gradients = sum(cost.gradients for cost in costs)
        exposed = max(0.0, gradients - backward) if overlapped else gradients
        update = sum(cost.update for cost in costs)
        sizes = stage, layout.pp, ranks_of(layout) // layout.pp
        return cls(modules, *sizes, forward, backward, messages, exposed, update)

    @property
    def title(self) -> str:
        """The modules and the stage, as text."""
        name = " + ".join(self.modules)
        return f"{name}, stage {self.stage + 1} of {self.stages}" if self.stages > 1 else name


@dataclass(frozen=True)
class Pipeline:
    """A candidate as a pipeline of stages."""

    stages: tuple[Stage, ...]
    work: tuple[RankWork, ...]
    microbatches: float
    """Microbatches of a step; a fraction for the mean of several steps."""
    chunks: int


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a candidate."""

    seconds: float
    bubble: float
    """Share of the schedule in which ranks of the language model wait."""
    idle: Mapping[str, float]
    """Module -> share of a step in which its ranks neither compute nor communicate."""
    busiest: str
    """The stage that limits the others."""
    shares: Mapping[str, float]
    """Shares of a step of the busiest stage: computing, messages, waiting, gradients, update."""


class Predictor:
    def __init__(self, cfg: ConfigContainer, costs: Costs, links: Links, counts: Counts | None = None):
        """`counts`: loads of the data; None: every microbatch is full."""
        self._cfg, self._costs, self._links, self._counts = cfg, costs, links, counts

    def microbatches(self, micro_batch_size: int, replicas: int) -> int:
        """Return the microbatches of a step; packed rows count as rows of full-length samples."""
        cfg, samples = self._cfg, micro_batch_size * replicas
        if cfg.data.pack:
            tokens = cfg.train.global_batch_size * cfg.data.sequence_length
            row = cfg.data.pack_length or micro_batch_size * cfg.data.sequence_length
            return max(1, -(-tokens // (row * replicas)))
        return cfg.train.global_batch_size // samples

    def rows(self, micro_batch_size: int) -> int:
        """Return the full-length samples in a microbatch on a data-parallel rank of the language model."""
        cfg = self._cfg
        return pack_length(cfg) // cfg.data.sequence_length if cfg.data.pack_length else micro_batch_size

    def _pipeline(self, candidate: Candidate, loads: Loads) -> Pipeline:
        language, cfg = candidate.language, self._cfg
        samples = self.rows(candidate.micro_batch_size)
        divided, recompute = candidate.distributed_optimizer, candidate.recompute
        across = self._links.between(candidate.world_size)
        of_language = self._costs.language(language, samples, recompute, divided=divided)
        microbatch = samples * language.dp
        of_encoders = {
            name: self._costs.encoder(
                name, candidate.layouts[name], microbatch / candidate.layouts[name].dp, recompute, divided=divided
            )
            for name in candidate.layouts
            if name != LANGUAGE
        }
        stages: list[Stage] = []
        work: list[RankWork] = []
        chains = [tuple(candidate.apart)] if candidate.together else [(name,) for name in candidate.apart]
        lengths = [candidate.layouts[chain[0]].pp for chain in chains if chain]
        first = sum(lengths)
        for chain in chains:
            if not chain:
                continue
            layout = candidate.layouts[chain[0]]
            nbytes = sum(self._costs.features(name, microbatch / candidate.layouts[name].dp) for name in chain)
            send = self._links.send(nbytes, across)
            for stage in range(layout.pp):
                costs, parts = _loaded([(name, of_encoders[name][stage]) for name in chain], loads)
                ranks = RankWork.of(chain, stage, layout, costs)
                destination = len(stages) + 1 if stage < layout.pp - 1 else first
                stages.append(Stage(ranks.forward, ranks.backward, destination, send, parts))
                work.append(ranks)
        send = self._links.send(self._costs.boundary(language, samples), across)
        shared = tuple(name for name in candidate.layouts if name in candidate.shared)
        overlapped, parts = cfg.optim.overlap_grad_reduce, tuple[Part, ...]()
        for stage, cost in enumerate(of_language):
            if stage > 1 and cost is of_language[stage - 1]:
                ranks = ranks._replace(stage=stage)
            else:
                inside = shared if stage == 0 else ()
                costs, parts = _loaded([*((name, of_encoders[name][0]) for name in inside), (LANGUAGE, cost)], loads)
                ranks = RankWork.of((*inside, LANGUAGE), stage, language, costs, overlapped=overlapped)
            following = len(stages) + 1 if stage < language.pp - 1 else None
            stages.append(Stage(ranks.forward, ranks.backward, following, send, parts))
            work.append(ranks)
        # The number of packed rows depends on the data.
        even = self.microbatches(candidate.micro_batch_size, language.dp)
        number = loads[LANGUAGE].microbatches if loads else even
        return Pipeline(tuple(stages), tuple(work), number, language.vpp)

    def least_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound of `predict(candidate).seconds`, for a mean step: it is below the steps' mean bound."""
        pipeline = self._pipeline(candidate, {} if self._counts is None else self._counts.mean(candidate))
        gradients = max(work.gradients for work in pipeline.work)
        schedule = least_seconds(pipeline.stages, pipeline.microbatches, pipeline.chunks)
        return max(schedule, gradients, self._on_cores(pipeline)) + self._update(pipeline)

    def predict(self, candidate: Candidate) -> Prediction:
        """Simulate a full step, or the known steps of the data."""
        loads = [{}] if self._counts is None else self._counts.loads(candidate)
        steps = [self._predict(self._pipeline(candidate, each)) for each in loads]
        first = steps[0]
        return replace(
            first,
            seconds=fmean(step.seconds for step in steps),
            bubble=fmean(step.bubble for step in steps),
            idle={name: fmean(step.idle[name] for step in steps) for name in first.idle},
            shares={name: fmean(step.shares[name] for step in steps) for name in first.shares},
        )

    def _predict(self, pipeline: Pipeline) -> Prediction:
        done, number = self._ends(pipeline), pipeline.microbatches
        after = [end + work.gradients for end, work in zip(done, pipeline.work, strict=True)]
        update = self._update(pipeline)
        seconds = max(*after, self._on_cores(pipeline)) + update
        busy = [number * (stage.forward + stage.backward) for stage in pipeline.stages]
        of_language = [at for at, work in enumerate(pipeline.work) if LANGUAGE in work.modules]
        bubble = max(0.0, 1 - sum(busy[at] for at in of_language) / (len(of_language) * max(done)))
        at = max(range(len(busy)), key=busy.__getitem__)
        busiest = pipeline.work[at]
        parts = {
            "computing": busy[at] - number * busiest.messages,
            "messages": number * busiest.messages,
            "gradients": busiest.gradients,
            "update": update,
        }
        parts["waiting"] = max(0.0, seconds - sum(parts.values()))
        shares = {name: part / seconds for name, part in parts.items()}
        return Prediction(seconds, bubble, self._idle(pipeline, busy, seconds), busiest.title, shares)

    def _idle(self, pipeline: Pipeline, busy: Sequence[float], seconds: float) -> dict[str, float]:
        idle = {}
        for name in self._cfg.modules:
            used = [
                busy[at] + work.gradients + work.update for at, work in enumerate(pipeline.work) if name in work.modules
            ]
            idle[name] = max(0.0, 1 - sum(used) / (len(used) * seconds))
        return idle

    def _ends(self, pipeline: Pipeline) -> list[float]:
        cores, cut = self._cores(pipeline), (int(pipeline.microbatches), pipeline.chunks)
        if not cores:
            return ends(pipeline.stages, *cut)
        return ends_on_cores(pipeline.stages, [work.ranks for work in pipeline.work], cores, *cut)

    def _on_cores(self, pipeline: Pipeline) -> float:
        """Return the seconds that shared cores need for all ranks up to the update. Messages use core time too."""
        number = pipeline.microbatches
        return self._shared(
            pipeline, [number * (work.forward + work.backward) + work.gradients for work in pipeline.work]
        )

    def _update(self, pipeline: Pipeline) -> float:
        """Return the seconds of the update, which waits for all gradients, and of a process outside layers."""
        updates = [work.update + self._links.device.process for work in pipeline.work]
        return max(*updates, self._shared(pipeline, updates))

    def _shared(self, pipeline: Pipeline, seconds: Sequence[float]) -> float:
        """Return the seconds of shared cores, for `seconds` per rank of each stage; 0 if ranks share no cores."""
        cores = self._cores(pipeline)
        if not cores:
            return 0.0
        return sum(work.ranks * own for work, own in zip(pipeline.work, seconds, strict=True)) / cores

    def _cores(self, pipeline: Pipeline) -> float:
        ranks, node = sum(work.ranks for work in pipeline.work), self._links.node
        return min(self._links.device.cores, node) * max(1.0, ranks / node)


def _loaded(costs: Sequence[tuple[str, StageCost]], loads: Loads) -> tuple[list[StageCost], tuple[Part, ...]]:
    """Return (costs of the modules on a stage for a mean microbatch, parts that differ between microbatches)."""
    if not loads:
        return [cost for _, cost in costs], ()
    parts = tuple(
        Part(cost.forward + cost.forward_messages, cost.backward + cost.backward_messages, loads[name].shares)
        for name, cost in costs
    )
    return [_mean(cost, loads[name]) for name, cost in costs], parts


def _mean(cost: StageCost, load: Load) -> StageCost:
    share = load.total / load.microbatches
    return replace(
        cost,
        forward=share * cost.forward,
        backward=share * cost.backward,
        forward_messages=share * cost.forward_messages,
        backward_messages=share * cost.backward_messages,
    )
