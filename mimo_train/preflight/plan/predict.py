"""The predicted time of a step of a candidate, from the costs of its stages and the schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.devices import Links
from mimo_train.layout.batch import pack_length
from mimo_train.preflight.plan.candidate import Candidate, ranks_of
from mimo_train.preflight.plan.costs import Costs, StageCost


@dataclass(frozen=True)
class DataShares:
    """The work of a step of the data, relative to a step of full samples."""

    tokens: float = 1.0
    """Share of the tokens of texts."""
    work: Mapping[str, float] | None = None
    """Share of the FLOPs of each module; None: all are full."""
    steps: int = 0
    """Steps of the data that were read."""
    missing: str = ""
    """The reason if no step was read."""


FULL = DataShares()


class Stage(NamedTuple):
    """The work of the ranks of a pipeline stage, in seconds per microbatch unless stated otherwise."""

    modules: tuple[str, ...]
    """Modules on these ranks."""
    number: int
    """From 0, within the first of these modules."""
    stages: int
    destination: int | None
    """Index of the stage that receives the output; None for the last stage."""
    send: float
    """Seconds of a message to the destination, or of its gradient back."""
    ranks: int
    forward: float
    backward: float
    messages: float
    """Messages of both passes that block matmuls."""
    gradients: float
    """Reduction of gradients after the last microbatch of a step."""
    update: float
    """Optimizer update of a step."""
    first: float
    """Both passes of a microbatch through the encoders on these ranks and the first of several model chunks."""

    @property
    def title(self) -> str:
        """The modules and the stage, as text."""
        name = " + ".join(self.modules)
        return f"{name}, stage {self.number + 1} of {self.stages}" if self.stages > 1 else name


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


def schedule_seconds(stages: Sequence[Stage], microbatches: float) -> float:
    """Return the seconds of all microbatches under 1F1B, or interleaved in model chunks: the mean of two bounds. Both
    are exact for equal stages without messages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), and their mean
    was within 4 % of a simulation for 90 % of random pipelines. `stages`: sources before destinations.

    At least, a stage computes all microbatches after the first one has reached it, and the last gradient goes back. At
    most, the first microbatch takes the whole path there and back, and the busiest stage all others.
    """
    paths = [0.0] * len(stages)
    for path, stage in zip(paths, stages, strict=True):  # destinations come later, and see what is written here
        if stage.destination is not None:
            path += stage.first + 2 * stage.send
            paths[stage.destination] = max(paths[stage.destination], path)
    busy = [stage.forward + stage.backward for stage in stages]
    least = max(path + microbatches * each for path, each in zip(paths, busy, strict=True))
    most = max(path + stage.first for path, stage in zip(paths, stages, strict=True))
    rest = max(microbatches * each - stage.first for each, stage in zip(busy, stages, strict=True))
    return (least + most + rest) / 2


class Predictor:
    """Predicts steps of the candidates of a run."""

    def __init__(self, cfg: ConfigContainer, costs: Costs, links: Links, shares: DataShares = FULL):
        self._cfg, self._costs, self._links, self._shares = cfg, costs, links, shares

    def seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step. Without an encoder that a candidate lacks they are a lower bound."""
        stages, microbatches = self._stages(candidate)
        return self.until_update(candidate, stages, microbatches) + self.update(stages)

    def predict(self, candidate: Candidate) -> Prediction:
        """Return the seconds of a step, and what they are spent for."""
        stages, microbatches = self._stages(candidate)
        update = self.update(stages)
        seconds = self.until_update(candidate, stages, microbatches) + update
        busy = [microbatches * (stage.forward + stage.backward) for stage in stages]
        at = max(range(len(busy)), key=busy.__getitem__)
        messages = microbatches * stages[at].messages
        parts = {"computing": busy[at] - messages, "messages": messages}
        parts |= {"gradients": stages[at].gradients, "update": update}
        parts["waiting"] = max(0.0, seconds - sum(parts.values()))
        schedule = schedule_seconds(stages, microbatches)
        language = [spent for stage, spent in zip(stages, busy, strict=True) if LANGUAGE in stage.modules]
        return Prediction(
            seconds,
            max(0.0, 1 - sum(language) / (len(language) * schedule)),
            {name: self._idle(name, stages, busy, seconds) for name in candidate.layouts},
            stages[at].title,
            {name: part / seconds for name, part in parts.items()},
        )

    def _stages(self, candidate: Candidate) -> tuple[list[Stage], float]:
        """Return (stages, sources before destinations; microbatches of a step)."""
        language, cfg = candidate.language, self._cfg
        # Full-length samples in a microbatch on a data-parallel rank of the language model.
        samples = pack_length(cfg) // cfg.sample_length if cfg.data.pack_length else candidate.micro_batch_size
        full = cfg.train.global_batch_size / (samples * language.dp)
        # Packed rows are full, but fewer; other rows are shorter.
        microbatches = max(1.0, -(-full * self._shares.tokens // 1)) if cfg.data.pack else full
        work = self._shares.work or {}
        shares = {name: work.get(name, 1.0) * full / microbatches for name in candidate.layouts}
        across = self._links.between(candidate.world_size)
        items = {name: samples * language.dp / layout.dp for name, layout in candidate.layouts.items()}
        costs = {
            name: [_scaled(cost, shares[name]) for cost in self._costs_of(candidate, name, items[name])]
            for name in candidate.layouts
        }
        stages: list[Stage] = []
        chains = [tuple(candidate.apart)] if candidate.together else [(name,) for name in candidate.apart]
        first = sum(candidate.layouts[chain[0]].pp for chain in chains)
        for chain in chains:
            layout = candidate.layouts[chain[0]]
            send = self._links.send(sum(self._costs.features(name, items[name]) for name in chain), across)
            for stage in range(layout.pp):
                destination = len(stages) + 1 if stage < layout.pp - 1 else first
                stages.append(_stage(chain, stage, layout, [costs[name][stage] for name in chain], destination, send))
        send = self._links.send(self._costs.boundary(language, samples), across)
        shared = tuple(name for name in candidate.layouts if name in candidate.shared)
        for stage, cost in enumerate(costs[LANGUAGE]):
            following = len(stages) + 1 if stage < language.pp - 1 else None
            if stage > 1 and cost is costs[LANGUAGE][stage - 1]:
                stages.append(stages[-1]._replace(number=stage, destination=following))
                continue
            modules = (*(shared if stage == 0 else ()), LANGUAGE)
            of_stage = [*(costs[name][0] for name in modules[:-1]), cost]
            stages.append(_stage(modules, stage, language, of_stage, following, send))
        if cfg.optim.overlap_grad_reduce:
            stages = [each._replace(gradients=max(0.0, each.gradients - each.backward)) for each in stages]
        return stages, microbatches

    def _costs_of(self, candidate: Candidate, name: str, samples: float) -> list[StageCost]:
        layout = candidate.layouts[name]
        options = candidate.recompute, candidate.offload, candidate.distributed_optimizer
        if name == LANGUAGE:
            return self._costs.language(layout, int(samples), *options)
        return self._costs.encoder(name, layout, samples, *options)

    def until_update(self, candidate: Candidate, stages: Sequence[Stage], microbatches: float) -> float:
        """Return the seconds until all gradients are reduced."""
        schedule = schedule_seconds(stages, microbatches)
        return schedule + max(stage.gradients for stage in stages)

    def update(self, stages: Sequence[Stage]) -> float:
        """Return the seconds of the update, which waits for all gradients."""
        return max(stage.update for stage in stages)

    def _idle(self, name: str, stages: Sequence[Stage], busy: Sequence[float], seconds: float) -> float:
        used = [
            spent + stage.gradients + stage.update
            for stage, spent in zip(stages, busy, strict=True)
            if name in stage.modules
        ]
        return max(0.0, 1 - sum(used) / (len(used) * seconds))


def _stage(
    modules: tuple[str, ...],
    stage: int,
    layout: LayoutConfig,
    costs: Sequence[StageCost],
    destination: int | None,
    send: float,
) -> Stage:
    """Return a stage of modules that run one after the other."""
    forward = sum(cost.forward + cost.forward_messages for cost in costs)
    backward = sum(cost.backward + cost.backward_messages for cost in costs)
    messages = sum(cost.forward_messages + cost.backward_messages for cost in costs)
    gradients, update = sum(cost.gradients for cost in costs), sum(cost.update for cost in costs)
    ranks, last = ranks_of(layout) // layout.pp, costs[-1]
    # The layout is the last module's; encoders are not interleaved.
    of_chunks = last.forward + last.forward_messages + last.backward + last.backward_messages
    first = forward + backward - of_chunks * (1 - 1 / layout.vpp)
    numbers = ranks, forward, backward, messages, gradients, update, first
    return Stage(modules, stage, layout.pp, destination, send, *numbers)


def _scaled(cost: StageCost, share: float) -> StageCost:
    if share == 1:
        return cost
    return replace(
        cost,
        forward=share * cost.forward,
        backward=share * cost.backward,
        forward_messages=share * cost.forward_messages,
        backward_messages=share * cost.backward_messages,
    )
