"""Seconds of a pipeline stage: computation, messages, gradients, optimizer."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from encoders.base import GATED, most_tokens
from encoders.plain.spec import PlainSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_optim import MUON_ITERATIONS
from mimo_train.config.schema_train import recompute_parts
from mimo_train.estimate import devices
from mimo_train.estimate.activations import BYTES
from mimo_train.estimate.devices import Links
from mimo_train.estimate.flops import Work, module_work
from mimo_train.estimate.parameters import ParameterCount, module_parameters, vocabulary_parameters
from mimo_train.estimate.sharding import sharded_bytes
from mimo_train.layout.ranks import layers_of_stage
from mimo_train.models.blocks.attention.spec import Attention
from mimo_train.models.blocks.base import Layer, Share
from mimo_train.models.blocks.mlp.spec import Mlp

_GRADIENT = 4
"""Bytes of a gradient, in fp32."""
_MUON = MUON_ITERATIONS * 6
"""FLOPs of Muon for each element of a matrix, times its lesser dimension m: an iteration over m x n takes 4 m^2 n + 2
m^3, at most 6 m for each element."""
_STEP = 7 * 4
"""Bytes that an Adam update reads and writes per parameter: gradient, weight and two moments in fp32."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of a rank of a stage, per microbatch unless stated otherwise."""

    forward: float
    """Computation in forward."""
    backward: float
    forward_messages: float = 0.0
    """Messages inside layers over tp, cp and ep, which block the next matmuls."""
    backward_messages: float = 0.0
    gradients: float = 0.0
    """Reduction of gradients after the last microbatch of a step."""
    update: float = 0.0
    """Optimizer update of a step, with the all-gather of weights."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of the activations of a layer."""

    kept: float = 0.0
    """Those that forward makes for backward, without recomputation."""
    again: float = 0.0
    """Those that backward makes again."""
    copied: float = 0.0
    """Those that go to the host and back."""

    @classmethod
    def of(cls, layer: Layer, share: Share, recompute: str) -> "Traffic":
        """Return those of a dense layer with a value of `train.recompute`."""
        kept = layer.kept(share)
        if recompute == "full":
            return cls(kept, kept - share.local_tokens * layer.hidden * share.size)
        parts = tuple("mlp" if part == "experts" else part for part in recompute_parts(recompute))
        return cls(kept, kept - layer.kept(share, parts))

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.kept + other.kept, self.again + other.again, self.copied + other.copied)


class Costs:
    """Computes the costs of the stages of any layout of a run."""

    def __init__(self, cfgs: dict[str, ConfigContainer], vocab: int, media: dict[str, float], links: Links):
        """`cfgs`: the run with each candidate for `train.recompute`; `vocab`: rows of the embedding; `media`: media
        items of each module in a sample."""
        self._vocab, self._media, self._links = vocab, media, links
        self._cfg = next(iter(cfgs.values()))
        self._size = BYTES[self._cfg.train.precision]
        self._work = cache(self._work_of)
        self._module_work = cache(
            lambda name, recompute: module_work(cfgs[recompute], name, vocab, media.get(name, 0.0))
        )
        self._parameters, self._copied = cache(self._parameters_of), cache(self._copied_of)

    def language(
        self, layout: LayoutConfig, samples: int, recompute: str, offload: bool, distributed_optimizer: bool
    ) -> list[StageCost]:
        """Return the costs of each stage, for microbatches of `samples` samples on a data-parallel rank."""
        llm, cp = self._cfg.llm, layout.cp
        tokens = samples * self._cfg.sample_length // cp
        traffic = Traffic.of(_dense_layer(llm.mlp()), Share(tokens, self._size, tp=layout.tp, sp=layout.sp), recompute)
        if offload:
            traffic = replace(traffic, copied=self._copied(tokens, layout.tp, layout.sp, recompute))
        forward, backward = self._inside_language(layout, tokens)
        costs, cached = [], dict[tuple[Work, bool, bool], StageCost]()
        for stage in range(layout.pp):
            work = self._work(LANGUAGE, recompute, stage, layout.pp, layout.vpp)
            key = work, stage == 0, stage == layout.pp - 1
            if key not in cached:
                layers = layers_of_stage(llm.num_layers, stage, layout.pp)
                seconds = self._seconds(work, recompute, samples / (layout.tp * cp), layers, traffic)
                # One of the two exchanges of a layer is attention's.
                parts = 2 if recompute == "full" else len({*recompute_parts(recompute)} - {"norms"})
                again = forward * layers * min(parts, 2) / 2
                ahead, back = self._gathering(LANGUAGE, layout, *seconds)
                messages = forward * layers + ahead, backward * layers * (seconds[1] > 0) + again + back
                cached[key] = StageCost(
                    *seconds, *messages, *self._tail(LANGUAGE, layout, stage, distributed_optimizer)
                )
            costs.append(cached[key])
        return costs

    def encoder(
        self,
        name: str,
        layout: LayoutConfig,
        samples: float,
        recompute: str,
        offload: bool,
        distributed_optimizer: bool,
    ) -> list[StageCost]:
        """Return the costs of each stage of an encoder, for microbatches of `samples` samples on one replica."""
        module, size = self._cfg.modules[name], self._size
        encoder, media = module.encoder, samples * self._media[name]
        tokens = media * encoder.most_inner_tokens(module.projector.merge)
        plain = isinstance(encoder, PlainSpec)
        parts = () if plain else tuple(encoder.parts.values())
        share = Share(int(tokens), size, tp=layout.tp, sp=layout.sp)
        layers = [_dense_layer(Mlp(part.hidden_size, part.ffn_hidden_size, part.activation == GATED)) for part in parts]
        traffic = sum((Traffic.of(layer, share, recompute) for layer in layers), Traffic())
        if offload:
            traffic = replace(traffic, copied=traffic.kept - traffic.again)
        hidden = sum(part.hidden_size for part in parts)
        each = 4 * self._links.gather(tokens * hidden * size, layout.tp, layout.tp)
        costs = []
        for stage in range(layout.pp):
            work = self._work(name, recompute, stage, layout.pp, 1)
            layers_here = 1 if plain else layers_of_stage(max(part.built_layers for part in parts), stage, layout.pp)
            seconds = self._seconds(work, recompute, samples / layout.tp, layers_here, traffic)
            ahead, back = self._gathering(name, layout, *seconds)
            messages = each * layers_here + ahead, each * layers_here * (work.matmuls_back > 0) + back
            costs.append(StageCost(*seconds, *messages, *self._tail(name, layout, stage, distributed_optimizer)))
        return costs

    def boundary(self, layout: LayoutConfig, samples: int) -> float:
        """Return the bytes that a rank of the language model sends to the next stage for a microbatch."""
        tokens = samples * self._cfg.sample_length // layout.cp
        return tokens * self._cfg.llm.hidden_size * self._size / (layout.tp if layout.sp else 1)

    def features(self, name: str, samples: float) -> float:
        """Return the bytes of the features of a module for `samples` samples."""
        module = self._cfg.modules[name]
        tokens = samples * self._media[name] * most_tokens(module.encoder, module.projector)
        return tokens * self._cfg.llm.hidden_size * self._size

    def _inside_language(self, layout: LayoutConfig, tokens: int) -> tuple[float, float]:
        llm, links, size = self._cfg.llm, self._links, self._size
        tp, cp, across = layout.tp, layout.cp, layout.tp * layout.cp
        # Two all-reduces, or two gathers and two scatters; sequence parallel gathers the two inputs once more.
        message = links.gather(tokens * llm.hidden_size * size, tp, tp)
        forward, backward = 4 * message, (6 if layout.sp else 4) * message
        keys = llm.head_width * max(llm.key_heads, tp) / tp
        gathered = links.gather(2 * keys * tokens * cp * size, cp, across)
        forward, backward = forward + gathered, backward + gathered
        if llm.num_experts:
            local = tokens / (tp if layout.sp else 1) * llm.experts_per_token * llm.hidden_size * size
            span = max(layout.ep * layout.etp, across)
            dealt = 2 * (links.gather(local, layout.ep, span) + links.gather(local * layout.etp, layout.etp, tp))
            forward, backward = forward + dealt, backward + dealt
        return forward, backward

    def _gathering(self, name: str, layout: LayoutConfig, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds (in forward, in backward) that a sharded module waits for its weights, and for the
        reduction of its gradients. Layers are gathered while others compute."""
        if not layout.fsdp:
            return 0.0, 0.0
        count, _ = self._parameters(name, 1, 1, 1, 1, 1, 0)
        lanes = min(self._links.node, layout.dp)
        gather = self._links.gather(count.total * self._size, layout.dp, layout.dp, lanes)
        once = sharded_bytes(self._cfg, name, count, layout.dp).reduces_once
        scatter = 0.0 if once else self._links.gather(count.trainable * _GRADIENT, layout.dp, layout.dp, lanes)
        return max(0.0, gather - forward), max(0.0, gather + scatter - backward) if backward else 0.0

    def _copied_of(self, tokens: int, tp: int, sp: bool, recompute: str) -> float:
        """Return the bytes that a layer of the language model copies to the host, the mean of its layers."""
        share, layers = Share(tokens, self._size, tp=tp, sp=sp), self._cfg.llm.layers()
        return sum(layer.kept(share, recompute_parts(recompute)) for layer in layers) / len(layers)

    def _seconds(
        self, work: Work, recompute: str, share: float, layers: int, traffic: "Traffic"
    ) -> tuple[float, float]:
        """Return the compute seconds, forward and backward, or those of copies to and from the host, which overlap;
        `share`: samples divided by the ranks that share them."""
        has_gradients = work.matmuls_back + work.attention_back > 0
        device = self._links.device
        touched, again = (
            layers * each * devices.TOUCHED / (device.traffic * devices.TRAFFIC)
            for each in (traffic.kept, traffic.again)
        )
        copies = layers * traffic.copied / (device.host * devices.LINKS) if has_gradients else 0.0
        least = layers * devices.LEAST_LAYER
        forward = max(least, share * self._computing(work.matmuls, work.attention, work.in_fp8) + touched, copies)
        backward = (
            share * self._computing(work.matmuls_back, work.attention_back, work.in_fp8_back) + 2 * touched + again
        )
        passes = 3 if recompute == "full" else 2
        return forward, max(passes * least, backward, copies) if has_gradients else 0.0

    def _computing(self, matmuls: float, attention: float, in_fp8: float) -> float:
        """Return the seconds at the assumed rates; `in_fp8` of the FLOPs of matmuls are in fp8."""
        device = self._links.device
        rate = device.rate(self._cfg.train.precision)
        slow, fast = (matmuls - in_fp8) / rate, in_fp8 / (device.eighth or rate)
        return (slow + fast) / devices.MATMULS + attention / (rate * devices.ATTENTION)

    def _tail(self, name: str, layout: LayoutConfig, stage: int, distributed_optimizer: bool) -> tuple[float, float]:
        """Return the seconds of (reduction of gradients, update with the all-gather of weights)."""
        dense, experts = self._parameters(name, layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, stage)
        inner, divided = layout.tp * layout.cp, distributed_optimizer or layout.fsdp
        replicas, of_experts = layout.dp * layout.cp, inner * layout.dp // (layout.ep * layout.etp)
        gradients = update = 0.0
        tables = 0  # embedding and output layer, which Muon leaves to AdamW
        if name == LANGUAGE and dense.trainable == dense.total:
            tables = vocabulary_parameters(self._cfg.llm, self._vocab, layout.tp, stage, layout.pp)
        for count, ranks, repeats in ((dense, replicas, layout.tp), (experts, of_experts, layout.etp)):
            if not count.trainable:
                continue
            span, lanes = inner * layout.dp, max(1, min(self._links.node // inner, ranks))
            scatter = self._links.gather(count.trainable * _GRADIENT, ranks, span, lanes)
            gathered = self._links.gather(count.trainable * self._size, ranks, span, lanes)
            if not layout.fsdp:  # which gathers and reduces in every microbatch
                gradients += scatter if distributed_optimizer else 2 * scatter
                update += gathered if distributed_optimizer else 0.0
            sharing = ranks if divided else 1
            touched = count.trainable * _STEP / sharing
            update += touched / (self._links.device.traffic * devices.TRAFFIC)
            # Tensor-parallel ranks repeat each other's matrices.
            matrices = count.trainable - (tables if count is dense else 0)
            update += self._muon(name, matrices * repeats / sharing)
        return gradients, update

    def _muon(self, name: str, elements: float) -> float:
        """Return at most the seconds of Muon's iterations over matrices of these elements; 0 with another optimizer."""
        if self._cfg.optim_of(name).name != "muon":
            return 0.0
        width = self._cfg.llm.hidden_size if name == LANGUAGE else self._cfg.modules[name].encoder.hidden_size
        return self._computing(_MUON * width * elements, 0.0, 0.0)

    def _work_of(self, name: str, recompute: str, stage: int, stages: int, chunks: int) -> Work:
        work = self._module_work(name, recompute)
        return work.of_stage(stage, stages, chunks)

    def _parameters_of(
        self, name: str, tp: int, pp: int, vpp: int, ep: int, etp: int, stage: int
    ) -> tuple[ParameterCount, ParameterCount]:
        sizes: dict[str, Any] = {"tp": tp, "ep": ep, "etp": etp, "stage": stage, "stages": pp, "vpp": vpp}
        counts = module_parameters(self._cfg, name, self._vocab, **sizes)
        experts = counts.pop("experts", ParameterCount(0, 0))
        return sum(counts.values(), ParameterCount(0, 0)), experts


def _dense_layer(mlp: Mlp) -> Layer:
    """Return a layer with as many keys as queries and without rotation, by which the rates of devices were measured."""
    return Layer(mlp.hidden, Attention(mlp.hidden, mlp.hidden, mlp.hidden, 1), mlp)
