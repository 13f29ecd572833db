"""The search for the best layouts: all legal ones are predicted, and the fastest that fit into memory are checked."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count, product
from typing import cast

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.devices import MARGIN, Device, Links
from mimo_train.estimate.memory import GIB
from mimo_train.layout.run import INPUT_KEYS, config_faults
from mimo_train.preflight.plan.candidate import Candidate, FullestRank, ranks_of
from mimo_train.preflight.plan.costs import Costs
from mimo_train.preflight.plan.predict import FULL, DataShares, Prediction, Predictor
from mimo_train.preflight.plan.space import Space

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
    shares: DataShares = FULL
    """The work of the data, relative to full samples."""


@dataclass(frozen=True)
class Proposal:
    """A layout with its prediction."""

    candidate: Candidate
    prediction: Prediction
    memory: int
    """Bytes of the fullest rank."""


@dataclass(frozen=True)
class Plan:
    """The proposals, the fastest first, and the size of the search."""

    proposals: tuple[Proposal, ...]
    legal: int
    """Legal layouts of the language model."""
    predicted: int
    """Layouts of all modules whose step was predicted."""


def faults_of(cfg: ConfigContainer) -> list[Fault]:
    """Return the faults that `mimo-train check --without-data` reports."""
    return [fault for fault in config_faults(cfg) if fault.key not in INPUT_KEYS]


def require_sound(cfg: ConfigContainer) -> None:
    """Raise ConfigError for faults that the config also has on one GPU."""
    if LANGUAGE not in cfg.modules:
        raise ConfigError(config_faults(cfg))
    if faults := _faults_on_one_gpu(cfg, cfg.train.recompute, cfg.train.offload_activations == "layers"):
        raise ConfigError(faults)


def _faults_on_one_gpu(cfg: ConfigContainer, recompute: str, offload: bool) -> list[Fault]:
    layouts, optimizer = {name: LayoutConfig() for name in cfg.modules}, cfg.optim.distributed_optimizer
    shared = frozenset(cfg.encoders)
    return faults_of(Candidate(layouts, 1, recompute, optimizer, 0, 1, shared, offload).config(cfg))


class NothingFits(UserError):
    """Every legal layout needs more memory than available."""


def fullest_rank(cfg: ConfigContainer, request: Request) -> int | None:
    """Return the bytes of the fullest rank of the fastest layout that fits; None if none fits."""
    try:
        return plan(cfg, replace(request, top=1)).proposals[0].memory
    except UserError:
        return None


def plan(cfg: ConfigContainer, request: Request) -> Plan:
    """Search the best layouts of a run that `require_sound` accepts.

    Raises:
        NothingFits: no layout fits.
        UserError: no layout is legal, or checks reject all that fit.
    """
    search = _Search(cfg, request)
    proposals = search.proposals()
    if not proposals:
        raise search.failure()
    return Plan(tuple(proposals[: request.top]), search.legal, search.predicted)


class _Search:
    def __init__(self, cfg: ConfigContainer, request: Request):
        self._cfg, self._request = cfg, request
        self._space = Space(cfg, request.gpus, request.node)
        links = Links(request.device, request.node)
        recomputes = ("none", *(recompute for recompute, _ in self._space.savings()))
        cfgs = {each: replace(cfg, train=replace(cfg.train, recompute=each)) for each in recomputes}
        costs = Costs(cfgs, request.vocab, dict(request.media), links)
        self._predictor = Predictor(cfg, costs, links, request.shares)
        self._room = request.device.memory * (1 - request.margin)
        self._fullest = FullestRank(cfg, request.vocab, request.media)
        self._least, self._rejected = math.inf, cast(Fault | None, None)
        self._is_short = False
        """True if a layout lacked memory for activations."""
        self.legal = self.predicted = 0

    def proposals(self) -> list[Proposal]:
        """Return the layouts that fit, the fastest first: at least the best `top`, one of each language layout and
        placement of encoders."""
        numbers, proposals = count(), list[Proposal]()
        alone = [(self._predictor.seconds(candidate), next(numbers), candidate) for candidate in self._space.language()]
        self.legal = len(alone)
        heapify(alone)
        while alone:
            least, _, language = heappop(alone)
            last = proposals[self._request.top - 1 : self._request.top]
            if last and least >= last[0].prediction.seconds:  # no encoders make it faster
                break
            self._is_short = False
            if self._fits(language):
                candidates = [
                    (self._predictor.seconds(candidate), candidate) for candidate in self._candidates(language)
                ]
                self.predicted += len(candidates)
                proposals += self._best(candidates)
                proposals.sort(key=lambda proposal: proposal.prediction.seconds)
            if self._is_short and (language.recompute, language.offload) == ("none", False):
                for recompute, offload in self._savings:
                    saving = replace(language, recompute=recompute, offload=offload)
                    heappush(alone, (self._predictor.seconds(saving), next(numbers), saving))
        return proposals

    @cached_property
    def _savings(self) -> list[tuple[str, bool]]:
        return [saving for saving in self._space.savings() if not _faults_on_one_gpu(self._cfg, *saving)]

    def _best(self, candidates: list[tuple[float, Candidate]]) -> Iterator[Proposal]:
        """Yield the fastest candidate that fits and has no faults for each placement of encoders; of equal ones the
        one with the fewest ranks."""
        done = set[tuple[frozenset[str], bool]]()
        width = math.log1p(_ALIKE)
        for _, candidate in sorted(
            candidates, key=lambda option: (math.floor(math.log(option[0]) / width), option[1].world_size, option[0])
        ):
            placement = candidate.shared, candidate.together
            if placement in done or not self._fits(candidate):
                continue
            if faults := faults_of(candidate.config(self._cfg)):
                self._rejected = faults[0]
                continue
            done.add(placement)
            yield Proposal(candidate, self._predictor.predict(candidate), self._fullest(candidate))

    def _fits(self, candidate: Candidate) -> bool:
        memory = self._fullest.states(candidate)
        if memory <= self._room:
            memory = self._fullest(candidate)
            self._is_short = self._is_short or memory > self._room
        if memory > self._room:
            self._least = min(self._least, memory)
        return memory <= self._room

    def _candidates(self, language: Candidate) -> Iterator[Candidate]:
        """Yield a candidate with every layout and placement of encoders."""
        encoders, free = list(self._cfg.encoders), language.gpus - ranks_of(language.language)
        inside = {name: [*self._space.shared(name, language)] for name in encoders}
        apart_of = {name: self._best_apart(name, language, free) for name in encoders}
        for placed in product((True, False), repeat=len(encoders)):
            where = dict(zip(encoders, placed, strict=True))
            shared = frozenset(name for name in encoders if where[name])
            for layouts in product(*(inside[name] if where[name] else apart_of[name] for name in encoders)):
                chosen = dict(zip(encoders, layouts, strict=True))
                candidate = replace(
                    language,
                    layouts={name: chosen.get(name, language.language) for name in self._cfg.modules},
                    shared=shared,
                )
                apart = [chosen[name] for name in encoders if not where[name]]
                ranks = [ranks_of(layout) for layout in apart]
                if sum(ranks) <= free and self._fits_nodes(language.language, apart):
                    yield candidate
                if len(apart) > 1 and len({(ranks_of(each), each.pp) for each in apart}) == 1 and ranks[0] <= free:
                    yield replace(candidate, together=True)

    def _best_apart(self, name: str, language: Candidate, free: int) -> list[LayoutConfig]:
        """Return layouts of a separate encoder; with several encoders only the fastest of each number of ranks."""
        layouts = [*self._space.apart(name, language, free)]
        if len(self._cfg.encoders) == 1:
            return layouts

        def order(layout: LayoutConfig) -> tuple[float, int]:
            candidate = replace(language, layouts={name: layout, LANGUAGE: language.language})
            return self._predictor.seconds(candidate), ranks_of(layout)

        chosen: list[LayoutConfig] = []
        for layout in sorted(layouts, key=order):
            if all(ranks_of(layout) < ranks_of(other) for other in chosen):
                chosen.append(layout)
        return chosen[:_WAYS]

    def _fits_nodes(self, language: LayoutConfig, apart: list[LayoutConfig]) -> bool:
        """True if tensor-parallel groups can start at multiples of their size; a quick test before the checks."""
        if self._request.gpus <= self._request.node or self._cfg.placement.tp_across_nodes or len(apart) != 1:
            return True
        (encoder,) = apart
        return ranks_of(encoder) % language.tp == 0 or ranks_of(language) % encoder.tp == 0

    def failure(self) -> UserError:
        """Return the reason of a search without proposals."""
        request, room = self._request, self._room / GIB
        if not self.legal:
            return UserError(
                f"--gpus: no layout of the language model has at most {request.gpus} ranks and divides "
                f"train.global_batch_size {self._cfg.train.global_batch_size}: change one of them"
            )
        if self._rejected is not None:
            return UserError(f"--gpus: checks reject all layouts that fit, the last one because of {self._rejected}")
        return NothingFits(
            f"--gpus: no layout fits on {request.gpus} x {request.device.name}: each needs at least "
            f"{self._least / GIB:.3g} GiB a rank, and {room:.3g} GiB are there ({request.margin:.0%} kept free)"
        )
