"""Process groups of a rank and what it costs to make them, by the size of the world.

    python -m benchmarks.groups [--worlds 64,512,2048] [--real 4,8,16,32]

An encoder with tensor and data parallelism beside a language model with tensor, pipeline and data parallelism. For the
large worlds one process is a rank of each kind, on torch's fake process group: calls of `new_group`, seconds of
`build_groups`. For the small ones all ranks are forked and meet over gloo on this machine: calls, seconds, and
operations on the store by which members meet, counted by a store that hands them on to a TCPStore. Those of torch
itself are counted once more with groups that connect nobody: gloo makes a connection between any two members, NCCL
needs one operation of each member for a communicator.
"""

import argparse
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.config.compose import load
from mimo_train.layout.ranks import RunLayout, lay_out
from mimo_train.preflight.dry_run.observation import kinds_of


@dataclass(frozen=True)
class Made:
    """By one rank."""

    kind: str
    calls: int
    seconds: float
    operations: int


def layout_of(world: int) -> RunLayout:
    """The larger a world, the more replicas: of 7 stages on 8 ranks each, beside an eighth of the ranks for the
    encoder; below 64 ranks of 3 stages of one rank, beside a quarter."""
    images, sizes = world // 8, {"tp": 8, "pp": 7, "dp": world // 64}
    if world < 64:
        images, sizes = world // 4, {"tp": 1, "pp": 3, "dp": world // 4}
    keys = [f"modules.language.layout.{axis}={size}" for axis, size in sizes.items()]
    keys += [f"modules.images.layout.tp={min(2, images)}", f"modules.images.layout.dp={max(1, images // 2)}"]
    return lay_out(load("vlm_digits", (*keys, "placement.mode=disjoint")))


class CountingStore(dist.Store):
    """Hands every operation on, and counts it."""

    def __init__(self, inner: dist.Store):
        super().__init__()
        self.inner, self.counts = inner, Counter[str]()


def _counted(name: str) -> Any:
    def call(self: CountingStore, *arguments: Any) -> Any:
        self.counts[name] += 1
        return getattr(self.inner, name)(*arguments)

    return call


for _name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "multi_get", "multi_set", "append",
              "has_extended_api", "num_keys", "set_timeout"):  # fmt: skip
    setattr(CountingStore, _name, _counted(_name))
_NO_MESSAGE = ("has_extended_api", "set_timeout")


def main() -> None:
    """Print a line for each world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=_numbers, default=[64, 512, 2048], help="of which one rank of a kind is run")
    parser.add_argument("--real", type=_numbers, default=[4, 8, 16, 32], help="of which all ranks are run")
    args = parser.parse_args()
    import megatron.core.hyper_comm_grid  # noqa: F401  # forked with this process, so that no rank waits for it

    for world in args.worlds:
        layout = layout_of(world)
        made = [_in_children(_fake, layout, [kind.rank])[0] for kind in kinds_of(layout)]
        _tell(world, layout, made, "fake groups, one rank of each kind")
    for world in args.real:
        layout = layout_of(world)
        for backend, how in (("gloo", "gloo"), ("fake", "no connections")):
            made = _in_children(_real, layout, [*range(world)], backend, meets=True)
            _tell(world, layout, made, f"{how}, {world} processes")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _tell(world: int, layout: RunLayout, made: list[Made], how: str) -> None:
    calls = [one.calls for one in made]
    said = f"{min(calls)} to {max(calls)} calls of new_group, {max(one.seconds for one in made):.3f} s at most"
    operations = [one.operations for one in made]
    if how.endswith("processes"):
        said += f"; operations of the store: {min(operations)} to {max(operations)} a rank, {sum(operations)} in all"
    modules = ", ".join(f"{name} {module}" for name, module in layout.modules.items())
    print(f"{world:,} ranks ({modules}), {how}: {said}", flush=True)


def _in_children(
    function: Any, layout: RunLayout, ranks: list[int], *arguments: Any, meets: bool = False
) -> list[Made]:
    """What ranks do, each in a process of its own, at once.

    Args:
        meets: whether they are told the port of a store first.
    """
    context = multiprocessing.get_context("fork")
    started = []
    for rank in ranks:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, function, layout, rank, *arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    # Behind all forks: the store has a thread, and a process that is forked while a thread holds a lock may stop at it.
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if meets else None
    for _, pipe in started:
        pipe.send(meeting.port if meeting else None)
    found = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
    return found


def _child(pipe: Connection, function: Any, layout: RunLayout, rank: int, *arguments: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(function(layout, rank, pipe.recv(), *arguments))
    pipe.close()
    os._exit(0)


def _fake(layout: RunLayout, rank: int, _port: None) -> Made:
    from mimo_train.preflight.dry_run import fake_world

    fake_world.join(rank, layout.world_size)
    return _made(layout, rank, None)


def _real(layout: RunLayout, rank: int, port: int, backend: str) -> Made:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # torch knows it by this

    world = layout.world_size
    inner = dist.TCPStore("localhost", port, wait_for_workers=False, timeout=timedelta(minutes=2))
    store = CountingStore(inner)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=2))
    store.counts.clear()
    made = _made(layout, rank, store)
    inner.add("done", 1)  # none ends while others still meet
    while inner.add("done", 0) < world:
        time.sleep(0.01)
    return made


def _made(layout: RunLayout, rank: int, store: CountingStore | None) -> Made:
    from mimo_train.parallel import device, groups

    device.install("cpu")
    calls, original = [0], dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    dist.new_group = new_group  # type: ignore[assignment]
    began = time.perf_counter()
    groups.build_groups(layout)
    seconds = time.perf_counter() - began
    operations = sum(number for name, number in store.counts.items() if name not in _NO_MESSAGE) if store else 0
    return Made(layout.kind_of(rank), calls[0], seconds, operations)


if __name__ == "__main__":
    main()
