"""The time of a step of a candidate, from the costs of its stages and the schedule. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.plan.padding import pack_length
from mimo_train.planner.candidate import Candidate, ranks_of
from mimo_train.planner.costs import Costs, StageCost
from mimo_train.planner.devices import Links
from mimo_train.planner.schedule import Stage, ends, least_seconds


class RankWork(NamedTuple):
    """What the ranks of a pipeline stage do; seconds of one microbatch, but for the last two."""

    modules: tuple[str, ...]
    """Those on them."""
    stage: int
    """Of the first of these modules, from 0."""
    stages: int
    ranks: int
    forward: float
    backward: float
    messages: float
    """That products wait for, in both."""
    gradients: float
    """After the last microbatch."""
    update: float

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
        """Of modules that work one after the other; `overlapped`: gradients are reduced while backward runs."""
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
        """For people."""
        name = " + ".join(self.modules)
        return f"{name}, stage {self.stage + 1} of {self.stages}" if self.stages > 1 else name


@dataclass(frozen=True)
class Pipeline:
    """A candidate as stages in time."""

    stages: tuple[Stage, ...]
    work: tuple[RankWork, ...]
    microbatches: int
    chunks: int

    @property
    def update(self) -> float:
        """Seconds of the update, which waits for the gradients of all."""
        return max(work.update for work in self.work)


@dataclass(frozen=True)
class Prediction:
    """What is expected of a candidate."""

    seconds: float
    """Of a step."""
    bubble: float
    """Share of the schedule in which the ranks of the language model wait."""
    idle: Mapping[str, float]
    """Module -> share of a step in which its ranks neither compute nor send."""
    busiest: str
    """The stage that the others wait for."""
    shares: Mapping[str, float]
    """What a step of the busiest stage consists of: computing, messages, waiting, gradients, update."""


class Predictor:
    """Predicts steps of one run."""

    def __init__(self, cfg: ConfigContainer, costs: Costs, links: Links):
        self._cfg, self._costs, self._links = cfg, costs, links

    def microbatches(self, micro_batch_size: int, replicas: int) -> int:
        """Of a step; packed rows are as if every sample were as long as any."""
        cfg, samples = self._cfg, micro_batch_size * replicas
        if cfg.data.pack:
            tokens = cfg.train.global_batch_size * cfg.data.sequence_length
            row = cfg.data.pack_length or micro_batch_size * cfg.data.sequence_length
            return max(1, -(-tokens // (row * replicas)))
        return cfg.train.global_batch_size // samples

    def rows(self, micro_batch_size: int) -> int:
        """Samples of a microbatch on a data-parallel rank of the language model, for what is computed."""
        cfg = self._cfg
        return pack_length(cfg) // cfg.data.sequence_length if cfg.data.pack_length else micro_batch_size

    def pipeline(self, candidate: Candidate) -> Pipeline:
        """Stages of a candidate with their costs."""
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
                own = RankWork.of(chain, stage, layout, [of_encoders[name][stage] for name in chain])
                taker = len(stages) + 1 if stage < layout.pp - 1 else first
                stages.append(Stage(own.forward, own.backward, taker, send))
                work.append(own)
        send = self._links.send(self._costs.boundary(language, samples), across)
        shared = tuple(name for name in candidate.layouts if name in candidate.shared)
        overlapped = cfg.optim.overlap_grad_reduce
        for stage, cost in enumerate(of_language):
            if stage > 1 and cost is of_language[stage - 1]:
                own = own._replace(stage=stage)
            else:
                beside = shared if stage == 0 else ()
                costs = [*(of_encoders[name][0] for name in beside), cost]
                own = RankWork.of((*beside, LANGUAGE), stage, language, costs, overlapped=overlapped)
            following = len(stages) + 1 if stage < language.pp - 1 else None
            stages.append(Stage(own.forward, own.backward, following, send))
            work.append(own)
        number = self.microbatches(candidate.micro_batch_size, language.dp)
        return Pipeline(tuple(stages), tuple(work), number, language.vpp)

    def least_seconds(self, pipeline: Pipeline) -> float:
        """A lower bound of `predict(pipeline).seconds`."""
        gradients = max(work.gradients for work in pipeline.work)
        schedule = least_seconds(pipeline.stages, pipeline.microbatches, pipeline.chunks)
        return max(schedule, gradients, self._on_cores(pipeline)) + pipeline.update

    def predict(self, pipeline: Pipeline) -> Prediction:
        """Simulate a step."""
        done, number = ends(pipeline.stages, pipeline.microbatches, pipeline.chunks), pipeline.microbatches
        after = [end + work.gradients for end, work in zip(done, pipeline.work, strict=True)]
        seconds = max(*after, self._on_cores(pipeline)) + pipeline.update
        busy = [number * (stage.forward + stage.backward) for stage in pipeline.stages]
        of_language = [at for at, work in enumerate(pipeline.work) if LANGUAGE in work.modules]
        bubble = max(0.0, 1 - sum(busy[at] for at in of_language) / (len(of_language) * max(done)))
        at = max(range(len(busy)), key=busy.__getitem__)
        one = pipeline.work[at]
        parts = {
            "computing": busy[at] - number * one.messages,
            "messages": number * one.messages,
            "gradients": one.gradients,
            "update": pipeline.update,
        }
        parts["waiting"] = max(0.0, seconds - sum(parts.values()))
        shares = {name: part / seconds for name, part in parts.items()}
        return Prediction(seconds, bubble, self._idle(pipeline, busy, seconds), one.title, shares)

    def _idle(self, pipeline: Pipeline, busy: Sequence[float], seconds: float) -> dict[str, float]:
        idle = {}
        for name in self._cfg.modules:
            own = [
                busy[at] + work.gradients + work.update for at, work in enumerate(pipeline.work) if name in work.modules
            ]
            idle[name] = max(0.0, 1 - sum(own) / (len(own) * seconds))
        return idle

    def _on_cores(self, pipeline: Pipeline) -> float:
        """Seconds that the cores of the nodes need for all ranks, where ranks share them."""
        cores = self._links.device.cores
        if not cores:
            return 0.0
        total = sum(work.ranks * pipeline.microbatches * (work.forward + work.backward) for work in pipeline.work)
        ranks = sum(work.ranks for work in pipeline.work)
        return total / (min(cores, self._links.node) * max(1.0, ranks / self._links.node))
