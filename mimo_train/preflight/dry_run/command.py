"""`mimo-train check CONFIG --dry-run`: runs each kind of rank in its own process, one after the other."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from data.text_format import plural, shown_lines
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.kernels import compiled_modules, has_fp8
from mimo_train.layout.run import Run, resolve
from mimo_train.preflight.dry_run.observation import Kind, RankFailure, RankResult, selected_kinds

LINES = 6
"""Source lines to list for a peak."""


def main(config: str, overrides: Sequence[str], ranks: str) -> int:
    """Run the ranks, print their results, and return 1 if one fails, else 0. `ranks`: see `selected_kinds`."""
    try:
        cfg = load(config, overrides, weights=False)
        run = resolve(cfg)
        kinds = selected_kinds(run.layout, ranks)
    except ConfigError as error:
        sys.stderr.write("".join(f"fault: {fault}\n" for fault in error.faults))
        return 1
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    from mimo_train.preflight.dry_run import one_rank

    print("\n" + heading(cfg, len(kinds), run.layout.world_size), flush=True)
    one_rank.import_program()
    expected = estimates(run)
    failed = False
    for kind in kinds:
        result = in_child(run, kind)
        failed = failed or isinstance(result, RankFailure)
        print("\n" + rank_text(result, expected.get(kind.rank, 0)), flush=True)
    print("\nno faults" if not failed else "\nthere are faults", flush=True)
    return int(failed)


def require_ranks(config: str, overrides: Sequence[str], ranks: str) -> None:
    """Check `--ranks` before anything is printed. Raises UserError as `selected_kinds`, and ignores config errors."""
    with suppress(ConfigError):
        selected_kinds(resolve(load(config, overrides, weights=False)).layout, ranks)


def in_child(run: Run, kind: Kind) -> RankResult | RankFailure:
    """Run a rank in a child process, since it changes torch for the whole process."""
    # Forked: the libraries are imported already, and importing them takes longer than most ranks take to run.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, kind, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return RankFailure(kind, f"the process ended with code {process.exitcode}", "", "")
    finally:
        process.join()


def _child(run: Run, kind: Kind, pipe: Connection) -> None:
    import warnings

    from mimo_train.preflight.dry_run import one_rank

    warnings.filterwarnings("ignore")
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sys.stderr = nowhere
        try:
            pipe.send(one_rank.run_rank(run, kind))
        except BaseException as error:
            pipe.send(RankFailure.of(kind, error))
    pipe.close()
    os._exit(0)


def estimates(run: Run) -> dict[int, int]:
    """Return the estimated bytes by rank, as in the table of `check`."""
    from mimo_train.estimate.memory import rank_memory, run_memory
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.inputs.datasets import tokenizer_of

    rows = embedding_rows(run.cfg.llm, tokenizer_of(run.cfg).vocab_size)
    return {rank: memory.total for rank, memory in rank_memory(run_memory(run, rows)).items()}


def heading(cfg: ConfigContainer, ranks: int, world: int) -> str:
    """Return the first lines of the output; `ranks`: number of ranks to run; `world`: number of all ranks."""
    device = "the CPU" if cfg.run.device == "cpu" else "CUDA, of which none is touched"
    head = f"Dry run of {ranks} of {plural(world, 'rank')}, as on {device}"
    if names := ", ".join(compiled_modules(cfg)):
        head += f"\nNOT TRIED: the compiler; layers of {names}, which the run compiles (train.compile), are as without"
    if names := ", ".join(has_fp8(cfg)):
        head += f"\nNOT TRIED: fp8 (train.fp8) and Transformer Engine; layers of {names} are torch's"
    return head


def rank_text(result: RankResult | RankFailure, estimate: int) -> str:
    """Return the paragraph of a rank; `estimate`: its estimated bytes, 0 if unknown."""
    kind = result.kind
    head = f"rank {kind.rank}: {kind.name}" + (f" (one of {kind.number:,} such ranks)" if kind.number > 1 else "")
    if isinstance(result, RankFailure):
        where = [f"  at {result.line}"] if result.line else []
        trace = [f"    {line}" for line in result.trace.splitlines()]
        return "\n".join([head, f"  FAILS: {shown_lines(result.what)}", *where, *trace])
    ratio = f"; {result.peak / estimate:.2f} of the estimate of {bytes_text(estimate)}" if estimate else ""
    categories = sorted(result.categories.items(), key=lambda item: -item[1])
    kernels = result.kernels.items()
    groups = ", ".join(f"{description} {ranks}" for description, ranks in result.groups)
    lines = [
        head,
        f"  memory of tensors at the peak: {bytes_text(result.peak)}{ratio}",
        "    " + ", ".join(f"{name} {bytes_text(size)}" for name, size in categories),
        *(f"    {bytes_text(size):>10}  {category}, made at {line}" for category, line, size in result.lines[:LINES]),
        f"  process groups: {len(result.groups)} ({groups})",
        f"  a step: {result.flops:.4g} floating point operations",
        *(f"    {fused} kernels in a layer of {name}, {single} without fusions" for name, (fused, single) in kernels),
        *(f"    {number:,} x {name}, {bytes_text(nbytes)}" for name, (number, nbytes) in result.messages.items()),
        "  the host waits for the device in a step: " + (_waits_text(result.waits) or "never"),
    ]
    if result.waits_inside:
        lines.append("  WARNING: it waits between microbatches: " + _waits_text(result.waits_inside))
    evaluated = " and evaluated" if result.evaluated else ""
    lines.append(
        f"  trained{evaluated} in {result.seconds:.0f} s, {bytes_text(result.resident)} of this machine's memory"
    )
    return "\n".join(lines)


def _waits_text(waits: dict[str, int]) -> str:
    return "; ".join(f"{number} x {what}" for what, number in waits.items())


def bytes_text(nbytes: float) -> str:
    """Return bytes as text, in the largest unit with at least one."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
