"""A plan as text and as JSON."""

import shlex
from collections.abc import Iterator
from typing import Any

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate import devices
from mimo_train.estimate.memory import GIB
from mimo_train.layout.kernels import has_fp8
from mimo_train.layout.ranks import lay_out
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.search import Plan, Proposal, Request

_SMALL = 0.03
"""Smaller shares of a step are not printed."""


def lines_of(plan: Plan, cfg: ConfigContainer, request: Request) -> Iterator[str]:
    """Yield the lines that the command prints."""
    device, node = request.device, f", {request.node} on a node" if request.gpus > request.node else ""
    media = [
        f", {number:g} {cfg.modules[name].encoder.medium}{'s' * (number != 1)} of {name} a sample"
        for name, number in request.media.items()
    ]
    yield (
        f"{request.gpus:,} x {device.name} ({device.memory / 1e9:g} GB, {device.half / 1e12:g} TFLOP/s in half "
        f"precision and {device.single / 1e12:g} in fp32, {device.inside / 1e9:g} GB/s inside of a node, "
        f"{device.across / 1e9:g} across){node}; {cfg.train.precision}, global batch of "
        f"{cfg.train.global_batch_size:,} samples of {cfg.sample_length:,} tokens{''.join(media)}"
    )
    yield f"layouts of {LANGUAGE}: {plan.legal:,}; of all modules {plan.predicted:,} predicted\n"
    for number, proposal in enumerate(plan.proposals, start=1):
        candidate, prediction = proposal.candidate, proposal.prediction
        samples, seconds = _samples(proposal, cfg, request), prediction.seconds
        used = "" if candidate.world_size == request.gpus else f" on {candidate.world_size:,} of them"
        yield f"{number}. {_layouts(candidate, cfg)}{used}"
        yield (
            f"   {f'{seconds:.2f} s' if seconds >= 1 else f'{seconds * 1e3:.3g} ms'} a step: "
            f"{f'{samples:,.0f}' if samples >= 100 else f'{samples:.3g}'} samples/s and "
            f"{samples * cfg.sample_length:,.0f} tokens/s for each GPU"
        )
        idle = ", ".join(f"{name} {share:.0%}" for name, share in prediction.idle.items())
        memory = f"{proposal.memory / GIB:.1f} of {device.memory / GIB:.1f} GiB"
        yield f"   bubble {prediction.bubble:.0%}; idle: {idle}; memory {memory}"
        parts = sorted(prediction.shares.items(), key=lambda part: -part[1])
        largest = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= _SMALL)
        yield f"   limited by {prediction.busiest}: {largest}"
        yield f"   {shlex.join(candidate.overrides(cfg)) or 'as the config is'}\n"
    yield from (f"note: {text}" for text in _notes(cfg, request))


def data_of(plan: Plan, cfg: ConfigContainer, request: Request) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "gpus": request.gpus,
        "device": request.device.name,
        "steps_of_data": request.shares.steps,
        "layouts": {"legal": plan.legal, "predicted": plan.predicted},
        "proposals": [
            {
                "overrides": proposal.candidate.overrides(cfg),
                "ranks": proposal.candidate.world_size,
                "step_seconds": proposal.prediction.seconds,
                "samples_per_second_per_gpu": _samples(proposal, cfg, request),
                "tokens_per_second_per_gpu": _samples(proposal, cfg, request) * cfg.sample_length,
                "bubble": proposal.prediction.bubble,
                "idle": dict(proposal.prediction.idle),
                "memory_bytes": proposal.memory,
                "busiest": proposal.prediction.busiest,
                "shares": dict(proposal.prediction.shares),
            }
            for proposal in plan.proposals
        ],
    }


def _layouts(candidate: Candidate, cfg: ConfigContainer) -> str:
    placement = dict.fromkeys(candidate.shared, " shared")
    if candidate.together:
        placement |= dict.fromkeys(candidate.apart, " together")
    modules = lay_out(candidate.config(cfg)).modules
    text = "; ".join(f"{name}{placement.get(name, '')} {module}" for name, module in modules.items())
    again = f", recompute {candidate.recompute}" if candidate.recompute != "none" else ""
    again += ", activations on the host" if candidate.offload else ""
    return f"{text}; micro batch {candidate.micro_batch_size}{again}"


def _samples(proposal: Proposal, cfg: ConfigContainer, request: Request) -> float:
    """Return the samples/s per available GPU, used or not."""
    return cfg.train.global_batch_size / proposal.prediction.seconds / request.gpus


def _notes(cfg: ConfigContainer, request: Request) -> Iterator[str]:
    device, shares, fp8 = request.device, request.shares, ", ".join(has_fp8(cfg))
    yield (
        f"assumed, not measured: matmuls reach {devices.MATMULS:.0%} of the peak, attention {devices.ATTENTION:.0%}, "
        f"memory {devices.TRAFFIC:.0%} and links {devices.LINKS:.0%} of theirs"
    )
    yield f"{request.margin:.0%} of the memory are kept free for what is not estimated"
    if shares.work:
        work = ", ".join(f"{name} {share:.0%}" for name, share in shares.work.items())
        yield f"work of the data relative to full samples, in {shares.steps} steps spread over it: {work}"
    else:
        yield f"every row is counted as full, every image as the largest ({shares.missing})"
    if cfg.llm.balances_microbatches:
        yield (
            f"results depend on the layout and on microbatches: modules.{LANGUAGE}.llm.router_balancing="
            f"{cfg.llm.router_balancing} balances experts over a microbatch of ranks (seq_aux_loss: over a sample)"
        )
    if fp8 and device.eighth:
        yield f"matmuls of fp8 layers ({fp8}) reach the same share of a peak of {device.eighth / 1e12:g} TFLOP/s"
    elif fp8:
        yield f"{device.name} has no fp8: layers of {fp8} are counted in {cfg.train.precision}"
    yield "compare proposals with each other, not with a clock: docs/planning.md has the limits of the model"
