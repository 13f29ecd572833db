"""The legal layouts of a run, module by module.

It uses the checks of a config (`mimo_train.layout.legality`, `mimo_train.layout.batch`). Checks across modules only run
for proposals (`mimo_train.preflight.plan.search`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from encoders.plain.spec import PlainSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_optim import OF_WHOLE_MATRICES
from mimo_train.config.transformers_llm import TransformersSizes
from mimo_train.layout.batch import Batch, sequence_faults
from mimo_train.layout.legality import encoder_faults, fsdp_faults, language_faults, projector_faults
from mimo_train.preflight.plan.candidate import Candidate, ranks_of

MOST_CP, MOST_CHUNKS, MOST_STAGES_OF_ENCODER = 16, 8, 8
"""Largest sizes to try."""
_FEW_STAGES = 12
_LEAST_PART = 256
"""Minimum tokens of a context-parallel rank."""


class Space:
    """Legal layouts of the modules of a run on a number of GPUs."""

    def __init__(self, cfg: ConfigContainer, gpus: int, node: int):
        """`cfg` has no faults on one GPU; `node`: GPUs of a node."""
        self._cfg, self._gpus, self._node = cfg, gpus, node
        self._sizes = list(Batch.of(cfg).sizes())
        self._encoder_is_legal = cache(self._is_legal_encoder)

    def language(self) -> Iterator[Candidate]:
        """Yield a candidate without encoders for every layout of the language model, on all GPUs or fewer. It keeps all
        activations."""
        cfg, length, batch = self._cfg, self._cfg.data.sequence_length, self._cfg.train.global_batch_size
        node = self._node if self._gpus > self._node else 0
        optimizers = (True,) if cfg.optim.distributed_optimizer else (False, True)
        for tp, pp, cp in product(_divisors(self._node), range(1, cfg.llm.num_layers + 1), _powers(MOST_CP)):
            ranks = tp * pp * cp
            if isinstance(cfg.llm, TransformersSizes) and ranks > 1:
                break  # data parallel only
            if ranks > self._gpus or (cp > 1 and cp * _LEAST_PART > length) or not self._is_tried(pp):
                continue
            # Sequence parallel is better where it can split the sequence.
            sps = [sp for sp in (tp > 1, False) if not [*sequence_faults(length, LayoutConfig(tp=tp, cp=cp, sp=sp))]]
            if not sps or not self._is_legal_language(LayoutConfig(tp=tp, sp=tp > 1)):
                continue
            for micro in sizes_of_microbatches(cfg):
                for dp in _divisors(batch // micro):
                    if ranks * dp > self._gpus or any(size % (micro * dp) for size in self._sizes):
                        continue
                    whole = LayoutConfig(tp, pp, dp, cp, sp=sps[0])
                    layouts = [*self._with_experts_and_chunks(whole, micro)]
                    if dp > 1 and self._can_shard(LANGUAGE):
                        layouts.append(replace(whole, fsdp=True))
                    for layout in layouts:
                        for divided in optimizers:
                            yield Candidate({LANGUAGE: layout}, micro, "none", divided, node, self._gpus)

    def savings(self) -> list[tuple[str, bool]]:
        """Return the ways to keep less on the device than all activations: values of `train.recompute`, with the rest
        on the device or on the host. Checks may reject them."""
        train, block = self._cfg.train, "experts" if self._cfg.llm.num_experts else "mlp"
        parts = ("norms", block, f"{block}+norms", f"attention+{block}+norms")
        values = dict.fromkeys(("none", *parts, train.recompute, "full"))
        return [way for way in product(values, (False, True)) if way != ("none", False)]

    def shared(self, name: str, candidate: Candidate) -> Iterator[LayoutConfig]:
        """Yield layouts of an encoder on the ranks of the language model's first stage."""
        ranks = ranks_of(candidate.language) // candidate.language.pp
        microbatch, is_equal = _microbatch(candidate), self._cfg.modules[name].balance == "samples"
        for tp in _divisors(self._node):
            # Replicas get equal numbers of samples, unless images are dealt.
            if ranks % tp == 0 and not (is_equal and microbatch % (ranks // tp)):
                layout = LayoutConfig(tp=tp, dp=ranks // tp, fsdp=self._is_sharded(name, candidate))
                if self._encoder_is_legal(name, tp, 1):
                    yield layout

    def apart(self, name: str, candidate: Candidate, free: int) -> Iterator[LayoutConfig]:
        """Yield layouts of an encoder on at most `free` ranks of its own."""
        most = 1 if self._has_one_stage(name) else MOST_STAGES_OF_ENCODER
        for tp, pp in product(_divisors(self._node), _powers(most)):
            if tp * pp > free or not self._encoder_is_legal(name, tp, pp):
                continue
            for dp in _divisors(_microbatch(candidate)):
                if tp * pp * dp <= free:
                    yield LayoutConfig(tp=tp, pp=pp, dp=dp, fsdp=self._is_sharded(name, candidate))

    def _can_shard(self, name: str) -> bool:
        module = replace(self._cfg.modules[name], layout=LayoutConfig(fsdp=True))
        return self._cfg.optim_of(name).name not in OF_WHOLE_MATRICES and not [*fsdp_faults(module, name)]

    def _is_sharded(self, name: str, candidate: Candidate) -> bool:
        """True if an encoder is sharded: where it can be, as the language model is."""
        return candidate.language.fsdp and self._can_shard(name)

    def _is_tried(self, stages: int) -> bool:
        """True for a number of stages that is small, divides the layers, or is a power of two."""
        return stages <= _FEW_STAGES or self._cfg.llm.num_layers % stages == 0 or stages & (stages - 1) == 0

    def _is_legal_language(self, layout: LayoutConfig) -> bool:
        return not [*language_faults(self._cfg.llm, layout, f"modules.{LANGUAGE}")]

    def _with_experts_and_chunks(self, layout: LayoutConfig, micro: int) -> Iterator[LayoutConfig]:
        llm = self._cfg.llm
        experts = [(1, 1)]
        if llm.num_experts:
            experts = [*product(_divisors(llm.num_experts), sorted({1, layout.tp}))]
        chunks = [1]
        if layout.pp > 1:
            chunks += [vpp for vpp in range(2, MOST_CHUNKS + 1) if llm.num_layers % (layout.pp * vpp) == 0]
        for (ep, etp), vpp in product(experts, chunks):
            # Interleaved stages take microbatches in groups of as many as there are stages.
            if vpp > 1 and any(size % (micro * layout.dp * layout.pp) for size in self._sizes):
                continue
            divided = replace(layout, ep=ep, etp=etp, vpp=vpp)
            if divided == layout and not llm.num_experts or self._is_legal_language(divided):
                yield divided

    def _is_legal_encoder(self, name: str, tp: int, pp: int) -> bool:
        module = replace(self._cfg.modules[name], layout=LayoutConfig(tp=tp, pp=pp))
        faults = [*encoder_faults(module, name), *projector_faults(module, self._cfg.llm.hidden_size, name)]
        return not faults

    def _has_one_stage(self, name: str) -> bool:
        """True if an encoder's features are kept, or it has no layers to divide."""
        module = self._cfg.modules[name]
        if module.feature_cache.dir or module.prefetch_microbatches or isinstance(module.encoder, PlainSpec):
            return True
        return min(part.built_layers for part in module.encoder.parts.values()) == 1


def _microbatch(candidate: Candidate) -> int:
    return candidate.micro_batch_size * candidate.language.dp


def sizes_of_microbatches(cfg: ConfigContainer) -> list[int]:
    """Return the values of `train.micro_batch_size` to try; packed rows of a given length do not depend on it."""
    size = cfg.train.micro_batch_size
    if cfg.data.pack and cfg.data.pack_length:
        return [size]
    return sorted({each for each in (*_powers(64), size) if cfg.train.global_batch_size % each == 0})


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


@cache
def _divisors(number: int) -> tuple[int, ...]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*low, *(number // each for each in low)}))
