"""Collectives of one rank: over at once, with what one rank gives as the result; of several ranks they are torch's."""

import torch
import torch.distributed as dist

from mimo_train.parallel.collectives import Done, return_at_once
from tests.dist.ranks import run_ranks


def _results() -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    calls: list[str] = []
    for name in ("allreduce", "_allgather_base", "_reduce_scatter_base", "broadcast"):
        original = getattr(dist.ProcessGroup, name)

        def counted(group, *arguments, name=name, original=original, **options):
            calls.append(f"{name} of {group.size()}")
            return original(group, *arguments, **options)

        setattr(dist.ProcessGroup, name, counted)
    return_at_once()
    found = {}
    for label, group in (("one", own), ("all", dist.group.WORLD)):
        mine = torch.tensor([1.0, 2.0]) + dist.get_rank()
        for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            tensor = mine.clone()
            dist.all_reduce(tensor, op=operation, group=group)
            found[f"{label} {name}"] = tensor.tolist()
        work = dist.all_reduce(mine.clone(), group=group, async_op=True)
        assert isinstance(work, Done) == (label == "one") and work.wait()
        gathered = torch.zeros(2 * group.size())
        dist.all_gather_into_tensor(gathered, mine, group=group)
        found[f"{label} gathered"] = gathered.tolist()
        part = torch.zeros(2 // group.size())
        dist.reduce_scatter_tensor(part, mine, group=group)
        found[f"{label} part"] = part.tolist()
        dist.broadcast(mine, group=group, group_src=0)
        found[f"{label} broadcast"] = mine.tolist()
        dist.barrier(group=group)
    assert {call for call in calls if call.endswith("of 1")} == set()
    assert len([call for call in calls if call.endswith("of 2")]) == 6
    dist.destroy_process_group()
    return found


def test_one_rank_has_what_it_gave_and_two_what_both_gave():
    first, second = run_ranks(_results, 2)
    for own, given in ((first, [1.0, 2.0]), (second, [2.0, 3.0])):
        assert {name: value for name, value in own.items() if name.startswith("one ")} == {
            "one sum": given,
            "one max": given,
            "one gathered": given,
            "one part": given,
            "one broadcast": given,
        }
        assert own["all sum"] == [3.0, 5.0] and own["all max"] == [2.0, 3.0] and own["all broadcast"] == [1.0, 2.0]
        assert own["all gathered"] == [1.0, 2.0, 2.0, 3.0]
    assert (first["all part"], second["all part"]) == ([3.0], [5.0])


def _premultiplied() -> bool:
    dist.init_process_group("gloo")
    return_at_once()
    # No identity: it goes to the backend, which refuses it.
    try:
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0))
    except (RuntimeError, ValueError):
        return True
    return False


def test_a_sum_that_multiplies_is_left_to_torch():
    assert run_ranks(_premultiplied, 1) == [True]
