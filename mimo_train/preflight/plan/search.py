"""The search for the best layouts: bounds for all legal ones, simulation of those with the best bounds."""

import heapq
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.devices import MARGIN, Device, Links
from mimo_train.estimate.memory import GIB
from mimo_train.layout.run import INPUT_KEYS, config_faults
from mimo_train.preflight.plan.candidate import Candidate, Fullest, ranks_of
from mimo_train.preflight.plan.costs import Costs, Profile
from mimo_train.preflight.plan.counts import Counts, KnownStep
from mimo_train.preflight.plan.predict import Prediction, Predictor
from mimo_train.preflight.plan.space import LanguageOption, Space

SIMULATED = 200
"""Maximum number of candidates to simulate, those with the best bounds."""
_OF_A_KIND = 8
"""Encoder layouts to keep for each language layout and placement of encoders."""
_ALIKE = 0.01
"""Relative difference of predictions below which they count as equal."""
_WAYS = 8
"""Layouts of each separate encoder to combine with those of other encoders."""


@dataclass(frozen=True)
class Request:
    """The hardware and the data of a plan."""

    gpus: int
    node: int
    """GPUs of a node."""
    device: Device
    vocab: int
    """Rows of the embedding."""
    media: Mapping[str, float]
    """Media items of each encoder in a sample."""
    margin: float = MARGIN
    top: int = 5
    profile: Profile | None = None
    steps: tuple[KnownStep, ...] = ()
    """Steps of the data to simulate; empty: every sample is full."""
    even_since: str = ""
    """The reason if `steps` is empty."""


@dataclass(frozen=True)
class Proposal:
    """A layout with its prediction."""

    candidate: Candidate
    prediction: Prediction
    memory: int
    """Bytes of the fullest rank."""


_Bounded = tuple[float, int, Candidate, int]
"""(minus the bound, minus the number, candidate, bytes of its fullest rank)."""


@dataclass(frozen=True)
class Plan:
    """The proposals, the fastest first, and the size of the search."""

    proposals: tuple[Proposal, ...]
    legal: int
    """Legal layouts of the language model."""
    bounded: int
    """Layouts of all modules with a bound."""
    fitting: int
    """Bounded layouts that fit into memory."""
    simulated: int


def faults_of(cfg: ConfigContainer) -> list[Fault]:
    """Return the faults that `mimo-train check --without-data` reports."""
    return [fault for fault in config_faults(cfg) if fault.key not in INPUT_KEYS]


def require_sound(cfg: ConfigContainer) -> None:
    """Raise ConfigError for faults that the config also has on one GPU."""
    if LANGUAGE not in cfg.modules:
        raise ConfigError(config_faults(cfg))
    alone = Candidate(
        {name: LayoutConfig() for name in cfg.modules},
        frozenset(cfg.encoders),
        False,
        1,
        cfg.train.recompute,
        cfg.optim.distributed_optimizer,
        0,
        1,
    )
    if found := faults_of(alone.config(cfg)):
        raise ConfigError(found)


class NothingFits(UserError):
    """Every legal layout needs more memory than available."""


def fullest_rank(cfg: ConfigContainer, request: Request) -> int | None:
    """Return the bytes of the fullest rank of the fastest layout that fits; None if none fits."""
    return _Search(cfg, request).fullest_rank()


def plan(cfg: ConfigContainer, request: Request) -> Plan:
    """Search the best layouts of a run that `require_sound` accepts.

    Raises:
        NothingFits: no layout fits.
        UserError: no layout is legal, or checks reject the best ones.
    """
    return _Search(cfg, request).run()


class _Search:
    def __init__(self, cfg: ConfigContainer, request: Request):
        self._cfg, self._request = cfg, request
        self._space = Space(cfg, request.gpus, request.node)
        links = Links(request.device, request.node)
        cfgs = {
            recompute: replace(cfg, train=replace(cfg.train, recompute=recompute))
            for recompute in self._space.recomputes()
        }
        costs = Costs(cfgs, request.vocab, dict(request.media), links, request.profile)
        counts = None
        if request.steps:
            counts = Counts(cfg, request.vocab, request.media, request.steps)
        self._predictor = Predictor(cfg, costs, links, counts)
        self._room = request.device.memory * (1 - request.margin)
        self._fullest = Fullest(cfg, request.vocab, request.media, partial(self._candidate, together=False))

    def run(self) -> Plan:
        options = [*self._options()]
        best, bounded, fitting = self._bounded(options, SIMULATED)
        if not best:
            raise self._nothing_fits(len(options))
        proposals, simulated, refused = self._chosen(best, self._request.top)
        if not proposals:
            raise UserError(
                f"--gpus: checks reject all of the best {simulated} layouts, the last one because of {refused[0]}"
            )
        return Plan(tuple(proposals[: self._request.top]), len(options), bounded, fitting, simulated)

    def fullest_rank(self) -> int | None:
        best, *_ = self._bounded([*self._options()], 1)
        return best[0][-1] if best else None

    def _bounded(self, options: Sequence[LanguageOption], most: int) -> tuple[list[_Bounded], int, int]:
        """Return (the `most` candidates that fit with the best bounds, number of bounded
        candidates, number of those that fit)."""
        found = [(self._bound(self._alone(option)), number, option) for number, option in enumerate(options)]
        best: list[_Bounded] = []
        bounded = fitting = 0
        for bound, _, option in sorted(found, key=lambda one: one[:2]):
            worst = -best[0][0] if len(best) == most else math.inf
            # The remaining options are no better with any encoders.
            if bound >= worst:
                break
            if self._fullest.of_language(option) > self._room:
                continue
            candidates = [(self._bound(candidate), candidate) for candidate in self._candidates(option)]
            bounded += len(candidates)
            for least, candidate, memory in self._few(candidates, option, worst):
                fitting += 1
                entry = (-least, -fitting, candidate, memory)
                (heapq.heappush if len(best) < most else heapq.heappushpop)(best, entry)
        return sorted(best, key=lambda one: (-one[0], -one[1])), bounded, fitting

    def _chosen(self, best: list[_Bounded], top: int) -> tuple[list[Proposal], int, list[Fault]]:
        """Return (accepted candidates, one of each kind, the fastest first; number of simulated ones; faults of the
        last rejected one). The candidates include the `top` fastest."""
        proposals: dict[Hashable, Proposal] = {}
        refused: list[Fault] = []
        simulated = 0
        for least, _, candidate, memory in best:
            slowest = sorted(one.prediction.seconds for one in proposals.values())[top - 1 : top]
            if slowest and -least >= slowest[0]:
                break
            simulated += 1
            proposal = Proposal(candidate, self._predictor.predict(candidate), memory)
            other = proposals.get(candidate.kind)
            if other is not None and not _is_better(proposal, other):
                continue
            if faults := faults_of(candidate.config(self._cfg)):
                refused = faults
                continue
            proposals[candidate.kind] = proposal
        return sorted(proposals.values(), key=lambda one: one.prediction.seconds), simulated, refused

    def _options(self) -> Iterator[LanguageOption]:
        return self._space.language()

    def _alone(self, option: LanguageOption) -> Candidate:
        return self._candidate(option, {}, frozenset(), together=False)

    def _candidate(
        self, option: LanguageOption, encoders: Mapping[str, LayoutConfig], shared: frozenset[str], *, together: bool
    ) -> Candidate:
        several = self._request.gpus > self._request.node
        layouts = {
            name: option.layout if name == LANGUAGE else encoders[name]
            for name in self._cfg.modules
            if name == LANGUAGE or name in encoders
        }
        return Candidate(
            layouts,
            shared,
            together,
            option.micro_batch_size,
            option.recompute,
            option.divided,
            self._request.node if several else 0,
            self._request.gpus,
        )

    def _bound(self, candidate: Candidate) -> float:
        return self._predictor.least_seconds(candidate)

    def _candidates(self, option: LanguageOption) -> Iterator[Candidate]:
        encoders = list(self._cfg.encoders)
        free = self._request.gpus - ranks_of(option.layout)
        inside = {name: [*self._space.shared(name, option)] for name in encoders}
        apart_of = {name: self._best_apart(name, option, free) for name in encoders}
        for placed in product((True, False), repeat=len(encoders)):
            where = dict(zip(encoders, placed, strict=True))
            shared = frozenset(name for name in encoders if where[name])
            choices = [inside[name] if where[name] else apart_of[name] for name in encoders]
            for layouts in product(*choices):
                chosen = dict(zip(encoders, layouts, strict=True))
                apart = [chosen[name] for name in encoders if not where[name]]
                if sum(map(ranks_of, apart)) <= free and self._fits_nodes(option, apart):
                    yield self._candidate(option, chosen, shared, together=False)
                if (
                    len(apart) > 1
                    and len({(ranks_of(one), one.pp) for one in apart}) == 1
                    and ranks_of(apart[0]) <= free
                ):
                    yield self._candidate(option, chosen, shared, together=True)

    def _best_apart(self, name: str, option: LanguageOption, free: int) -> list[LayoutConfig]:
        """Return layouts of a separate encoder; with several encoders only the fastest of each number of ranks."""
        every = [*self._space.apart(name, option, free)]
        if len(self._cfg.encoders) == 1:
            return every
        seconds = {}
        for layout in every:
            candidate = self._candidate(option, {name: layout}, frozenset(), together=False)
            seconds[id(layout)] = self._bound(candidate)
        chosen: list[LayoutConfig] = []
        for layout in sorted(every, key=lambda one: (seconds[id(one)], ranks_of(one))):
            if all(ranks_of(layout) < ranks_of(other) for other in chosen):
                chosen.append(layout)
        return chosen[:_WAYS]

    def _fits_nodes(self, option: LanguageOption, apart: list[LayoutConfig]) -> bool:
        """True if tensor-parallel groups can start at multiples of their size; a quick test before the checks."""
        if self._request.gpus <= self._request.node or self._cfg.placement.tp_across_nodes or len(apart) != 1:
            return True
        (encoder,) = apart
        return ranks_of(encoder) % option.tp == 0 or ranks_of(option.layout) % encoder.tp == 0

    def _few(
        self, found: list[tuple[float, Candidate]], option: LanguageOption, worst: float
    ) -> Iterator[tuple[float, Candidate, int]]:
        """Yield (bound, candidate, bytes of its fullest rank) of the best candidates of one language model that fit,
        with bounds below `worst`, for each placement of the encoders."""
        taken: dict[Hashable, int] = {}
        for least, candidate in sorted(found, key=lambda one: (one[0], one[1].world_size)):
            if least >= worst:
                return
            kind = candidate.kind
            if taken.get(kind, 0) == _OF_A_KIND:
                continue
            memory = self._fullest.of(candidate, option)
            if memory <= self._room:
                taken[kind] = taken.get(kind, 0) + 1
                yield least, candidate, memory

    def _nothing_fits(self, legal: int) -> UserError:
        least, room = self._fullest.least / GIB, self._room / GIB
        if not legal:
            return UserError(
                f"--gpus: no layout of the language model has at most {self._request.gpus} ranks and divides "
                f"train.global_batch_size {self._cfg.train.global_batch_size}: change one of them"
            )
        return NothingFits(
            f"--gpus: no layout fits on {self._request.gpus} x {self._request.device.name}: the one that needs least "
            f"has ranks of {least:.3g} GiB, and {room:.3g} GiB are there ({self._request.margin:.0%} kept free)"
        )


def _is_better(one: Proposal, other: Proposal) -> bool:
    """True if a proposal is faster than another of its kind; of equal ones if it has fewer ranks, then less memory."""
    seconds, others = one.prediction.seconds, other.prediction.seconds
    if abs(seconds / others - 1) > _ALIKE:
        return seconds < others
    return (one.candidate.world_size, one.memory) < (other.candidate.world_size, other.memory)
