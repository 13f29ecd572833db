"""A plan as text and as JSON."""

from typing import Any

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate import devices
from mimo_train.estimate.devices import Device
from mimo_train.estimate.memory import GIB
from mimo_train.layout.kernels import has_fp8
from mimo_train.layout.ranks import lay_out
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.search import Plan, Proposal, Request

_SMALL = 0.03
"""Smaller shares of a step are not printed."""


def lines_of(plan: Plan, cfg: ConfigContainer, request: Request) -> list[str]:
    """Return the lines that the command prints."""
    several = request.gpus > request.node
    nodes = f", {request.node} on a node" if several else ""
    lines = [
        f"{request.gpus:,} x {_described(request.device)}{nodes}; {cfg.train.precision}, global batch of "
        f"{cfg.train.global_batch_size:,} samples of {cfg.data.sequence_length:,} tokens"
        + "".join(f", {media:g} {cfg.modules[name].encoder.medium}{'s' * (media != 1)} of {name} a sample"
                  for name, media in request.media.items()),
        f"layouts of {LANGUAGE}: {plan.legal:,}; of all modules {plan.predicted:,} predicted",
        "",
    ]  # fmt: skip
    for number, proposal in enumerate(plan.proposals, start=1):
        lines += [*_proposal(number, proposal, cfg, request), ""]
    lines += [f"note: {text}" for text in _notes(cfg, request)]
    return lines


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
                "tokens_per_second_per_gpu": _samples(proposal, cfg, request) * cfg.data.sequence_length,
                "bubble": proposal.prediction.bubble,
                "idle": dict(proposal.prediction.idle),
                "memory_bytes": proposal.memory,
                "busiest": proposal.prediction.busiest,
                "shares": dict(proposal.prediction.shares),
            }
            for proposal in plan.proposals
        ],
    }


def _proposal(number: int, proposal: Proposal, cfg: ConfigContainer, request: Request) -> list[str]:
    candidate, prediction = proposal.candidate, proposal.prediction
    samples = _samples(proposal, cfg, request)
    room = request.device.memory / GIB
    idle = ", ".join(f"{name} {share:.0%}" for name, share in prediction.idle.items())
    used = "" if candidate.world_size == request.gpus else f" on {candidate.world_size:,} of them"
    parts = sorted(prediction.shares.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= _SMALL)
    return [
        f"{number}. {_layouts(candidate, cfg)}{used}",
        f"   {seconds_text(prediction.seconds)} a step: {_rate(samples)} samples/s and "
        f"{samples * cfg.data.sequence_length:,.0f} tokens/s for each GPU",
        f"   bubble {prediction.bubble:.0%}; idle: {idle}; memory {proposal.memory / GIB:.1f} of {room:.1f} GiB",
        f"   limited by {prediction.busiest}: {named}",
        f"   {' '.join(quoted(one) for one in candidate.overrides(cfg)) or 'as the config is'}",
    ]


def _layouts(candidate: Candidate, cfg: ConfigContainer) -> str:
    modules = lay_out(candidate.config(cfg)).modules
    text = "; ".join(f"{name}{_place(candidate, name)} {module}" for name, module in modules.items())
    again = f", recompute {candidate.recompute}" if candidate.recompute != "none" else ""
    return f"{text}; micro batch {candidate.micro_batch_size}{again}"


def _place(candidate: Candidate, name: str) -> str:
    if name in candidate.shared:
        return " shared"
    return " together" if candidate.together and name != LANGUAGE else ""


def _samples(proposal: Proposal, cfg: ConfigContainer, request: Request) -> float:
    """Return the samples/s per available GPU, used or not."""
    return cfg.train.global_batch_size / proposal.prediction.seconds / request.gpus


def _described(device: Device) -> str:
    return (
        f"{device.name} ({device.memory / 1e9:g} GB, {device.half / 1e12:g} TFLOP/s in half precision and "
        f"{device.single / 1e12:g} in fp32, {device.inside / 1e9:g} GB/s inside of a node, {device.across / 1e9:g} "
        "across)"
    )


def of_numbers(cfg: ConfigContainer) -> str:
    """Return a sentence if another layout changes results too; else empty."""
    if not cfg.llm.balances_microbatches:
        return ""
    return (
        f"numbers of a run follow from its layout and microbatches, since modules.{LANGUAGE}.llm.router_balancing="
        f"{cfg.llm.router_balancing} balances experts over a microbatch of ranks (seq_aux_loss: over a sample)"
    )


def _notes(cfg: ConfigContainer, request: Request) -> list[str]:
    return [
        f"assumed, not measured: matmuls reach {devices.MATMULS:.0%} of the peak, attention {devices.ATTENTION:.0%}, "
        f"memory {devices.TRAFFIC:.0%} and links {devices.LINKS:.0%} of theirs",
        f"{request.margin:.0%} of the memory are kept free for what is not estimated",
        _data(request),
        *filter(None, [of_numbers(cfg), _of_fp8(cfg, request)]),
        "compare proposals with each other, not with a clock: docs/planner.md has the limits of the model",
    ]


def _of_fp8(cfg: ConfigContainer, request: Request) -> str:
    modules, device = ", ".join(has_fp8(cfg)), request.device
    if not modules:
        return ""
    if not device.eighth:
        return f"layers of {modules} are in fp8, which {device.name} has none of: reckoned in {cfg.train.precision}"
    return f"products of layers in fp8 ({modules}) at the same share of a peak of {device.eighth / 1e12:g} TFLOP/s"


def _data(request: Request) -> str:
    shares = request.shares
    if not shares.work:
        return f"every row is counted as full, every image as the largest ({shares.missing})"
    work = ", ".join(f"{name} {share:.0%}" for name, share in shares.work.items())
    return f"work of the data relative to full samples, in {shares.steps} steps spread over it: {work}"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def quoted(override: str) -> str:
    """Return an override, quoted for a shell if necessary."""
    return f"'{override}'" if any(mark in override for mark in " {}") else override
