"""`mimo-train check CONFIG --dry-run`: each kind of rank in a process of its own, one after the other."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.layout.run import Run, resolve
from mimo_train.preflight.dry_run.kinds import Kind, chosen
from mimo_train.preflight.dry_run.report import Failed, Found, head_of, text_of


def main(config: str, overrides: Sequence[str], ranks: str, *, engine: bool = False) -> int:
    """Run the ranks, print what each does, and return 1 if one fails, else 0.

    Args:
        ranks: see `kinds.chosen`.
        engine: whether layers are Transformer Engine's, see `fake_engine`.
    """
    try:
        cfg = load(config, overrides)
        run = resolve(cfg)
        kinds = chosen(run.layout, ranks)
    except ConfigError as error:
        sys.stderr.write("".join(f"fault: {fault}\n" for fault in error.faults))
        return 1
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if engine:
        from mimo_train.preflight.dry_run import fake_engine

        fake_engine.install()
    from mimo_train.preflight.dry_run import one_rank

    faults = list(one_rank.refused(cfg, engine=engine))
    if faults:
        sys.stderr.write("".join(f"fault: {fault} (--dry-run)\n" for fault in faults))
        return 1
    print("\n" + head_of(cfg, len(kinds), run.layout.world_size), flush=True)
    one_rank.import_program()
    expected = estimates(run)
    failed = False
    for kind in kinds:
        found = in_child(run, kind, engine=engine)
        failed = failed or isinstance(found, Failed)
        print("\n" + text_of(found, expected.get(kind.rank, 0)), flush=True)
    print("\nno faults" if not failed else "\nthere are faults", flush=True)
    return int(failed)


def require_ranks(config: str, overrides: Sequence[str], ranks: str) -> None:
    """Before any check is printed: there are such ranks. Faults of the config are for the checks to tell.

    Raises:
        UserError: as of `kinds.chosen`.
    """
    with suppress(ConfigError):
        chosen(resolve(load(config, overrides)).layout, ranks)


def in_child(run: Run, kind: Kind, *, engine: bool = False) -> Found | Failed:
    """What a rank does, found in a process that ends with it, since torch is changed for all of it."""
    # Forked: the libraries, which take longer to import than most ranks to run, are there already.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, kind, engine, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return Failed(kind, f"the process ended with code {process.exitcode}", "", "")
    finally:
        process.join()


def _child(run: Run, kind: Kind, engine: bool, pipe: Connection) -> None:
    import warnings

    from mimo_train.preflight.dry_run import one_rank

    warnings.filterwarnings("ignore")
    # What the run prints is that of a run that is none.
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sys.stderr = nowhere
        try:
            pipe.send(one_rank.run_rank(run, kind, engine=engine))
        except BaseException as error:
            pipe.send(Failed.of(kind, error))
    pipe.close()
    os._exit(0)


def estimates(run: Run) -> dict[int, int]:
    """Bytes by rank, as `check` reckons them from sizes alone."""
    from mimo_train.estimate.memory import rank_memory, stage_memory
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.inputs.inputs import tokenizer_of

    rows = embedding_rows(run.cfg.llm, tokenizer_of(run.cfg).vocab_size)
    stages = [stage for name in run.layout.modules for stage in stage_memory(run, name, rows)]
    return {rank: memory.total for rank, memory in rank_memory(stages).items()}
