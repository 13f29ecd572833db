"""What `data.pack` asks of a run, and the rows that it makes. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.fault import Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig


def pack_length(cfg: ConfigContainer) -> int:
    """Most tokens of the samples of a packed row; 0 where rows are samples."""
    if not cfg.data.pack:
        return 0
    return cfg.data.pack_length or cfg.train.micro_batch_size * cfg.data.sequence_length


def row_multiple(language: LayoutConfig) -> int:
    """What makes a row equal parts for context-parallel ranks, two each, and for tensor-parallel ranks with sequence
    parallelism."""
    return (2 * language.cp if language.cp > 1 else 1) * (language.tp if language.sp else 1)


def packing_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Why the samples of this run cannot be packed, or keys of packing without it."""
    data, llm = cfg.data, cfg.llm
    if not data.pack:
        if data.pack_length:
            yield Fault("data.pack_length", f"is {data.pack_length}, and data.pack is false: set data.pack to true")
        return
    if 0 < data.pack_length < data.sequence_length:
        yield Fault(
            "data.pack_length",
            f"{data.pack_length} tokens do not hold the longest sample, of data.sequence_length "
            f"{data.sequence_length}: use at least that, better twice",
        )
    if cfg.encoders and cfg.placement.bridge != "native":
        yield Fault(
            "placement.bridge",
            f"is {cfg.placement.bridge}, whose features are as many samples on every rank, and data.pack gives each "
            "row other ones: use native",
        )
    if llm.num_experts and llm.router_aux_loss and llm.router_balancing not in _OF_TOKENS:
        what = "each row" if llm.router_balancing == "seq_aux_loss" else "ranks with as many tokens each"
        yield Fault(
            f"modules.{LANGUAGE}.llm.router_balancing",
            f"{llm.router_balancing} would balance {what}, and rows of data.pack are several samples and of other "
            f"lengths: use {' or '.join(_OF_TOKENS)}",
        )


_OF_TOKENS = ("aux_loss", "none")
"""Kinds of balancing that ask for no sequences."""
