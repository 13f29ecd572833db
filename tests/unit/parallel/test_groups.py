"""Which process groups a rank makes, at worlds of any size: torch's fake process group, one process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mimo_train.config.compose import load
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import resolve
from mimo_train.parallel import device
from mimo_train.parallel.groups import RunGroups, build_groups

SIZES = {64: (4, 3, 4), 512: (4, 7, 16), 2176: (8, 8, 32)}
"""World -> tp, pp and dp of the language model; the encoder has tp 2 and what is left."""


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch):
    """The groups of NCCL, by the fake process group; `test_groups_over_gloo_have_none_for_bridges` has the others."""
    monkeypatch.setattr(device, "backend_of_groups", lambda: "nccl")


def layout_of(world: int) -> RunLayout:
    """Images beside a language model, as in the recipes for clusters."""
    tp, pp, dp = SIZES[world]
    language = {"tp": tp, "pp": pp, "dp": dp}
    overrides = [f"modules.language.layout.{axis}={size}" for axis, size in language.items()]
    overrides += ["modules.images.layout.tp=2", f"modules.images.layout.dp={(world - tp * pp * dp) // 2}"]
    overrides += ["modules.language.llm.num_layers=56", "modules.language.llm.num_attention_heads=8"]
    overrides += ["train.global_batch_size=512"]
    layout = resolve(load("vlm_digits", overrides)).layout
    assert layout.world_size == world
    return layout


@contextmanager
def one_rank(monkeypatch, rank: int, world: int) -> Iterator[list]:
    """This process as one rank of a world of which it is the only one; gives the calls of `new_group`."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    calls, original = [], dist.new_group

    def new_group(ranks=None, *args, backend=None, **kwargs):
        calls.append((tuple(ranks), kwargs))
        return original(ranks, *args, **kwargs)

    monkeypatch.setattr(dist, "new_group", new_group)
    try:
        yield calls
    finally:
        monkeypatch.setattr(dist, "new_group", original)
        dist.destroy_process_group()


def built(monkeypatch, layout: RunLayout, rank: int) -> tuple[RunGroups, list]:
    """Groups of a rank, and how they were asked for."""
    with one_rank(monkeypatch, rank, layout.world_size) as calls:
        return build_groups(layout), calls


def kinds(layout: RunLayout) -> dict[str, int]:
    """A rank of each kind."""
    images, language = layout.modules["images"], layout.language
    stages = {"first": 0, "middle": language.pp // 2, "last": language.pp - 1}
    return {"images": images.ranks[-1]} | {name: language.stage_ranks(at)[-1] for name, at in stages.items()}


@pytest.mark.parametrize("world", SIZES)
def test_a_rank_makes_few_groups_at_any_world(monkeypatch, world):
    layout = layout_of(world)
    for kind, rank in kinds(layout).items():
        groups, calls = built(monkeypatch, layout, rank)
        made = [ranks for ranks, _ in calls]
        assert tuple(made) == groups.made
        assert 3 <= len(made) <= 10, (kind, len(made), [len(each) for each in made])
        assert all(rank in ranks for ranks in made), "a rank makes only groups that it is in"
        assert sum(len(ranks) == 1 for ranks in made) == 1, "one serves all cases of one rank"
        assert all(options["use_local_synchronization"] for _, options in calls)


def test_the_number_of_groups_does_not_grow_with_the_world(monkeypatch):
    numbers = {}
    for world in SIZES:
        layout = layout_of(world)
        for kind, rank in kinds(layout).items():
            numbers.setdefault(kind, set()).add(len(built(monkeypatch, layout, rank)[1]))
    assert all(len(each) == 1 for each in numbers.values()), numbers


def orders(monkeypatch, *overrides: str) -> list[tuple[tuple[int, ...], ...]]:
    """The groups of two ranks or more that each rank of a small world makes, in its order."""
    layout = resolve(load("vlm_digits", overrides)).layout
    everyone = [built(monkeypatch, layout, rank)[0].made for rank in range(layout.world_size)]
    return [tuple(ranks for ranks in made if len(ranks) > 1) for made in everyone]


SMALL = {
    "disjoint": ("modules.images.layout.dp=2", "modules.language.layout.tp=2", "modules.language.layout.pp=2"),
    "pp2 dp2": ("modules.language.layout.dp=2", "modules.language.layout.pp=2", "modules.images.layout.pp=2"),
    "shared": ("placement.mode=shared", "modules.images.layout.dp=4", "modules.language.layout.tp=2",
               "modules.language.layout.dp=2"),
    "cp": ("modules.language.layout.cp=2", "modules.language.layout.tp=2", "modules.images.layout.dp=4"),
    "experts": ("llm@modules.language.llm=gpt_tiny_moe", "modules.language.layout.dp=4",
                "modules.language.layout.ep=2", "train.global_batch_size=32"),
}  # fmt: skip


@pytest.mark.parametrize("overrides", SMALL.values(), ids=SMALL)
def test_members_make_a_group_as_often_as_each_other_and_in_an_order_that_cannot_deadlock(monkeypatch, overrides):
    """Each rank waits in its next group until all members have come to it: everybody gets through."""
    waiting = [list(made) for made in orders(monkeypatch, *overrides)]
    assert any(waiting)
    while any(waiting):
        ready = {made[0] for made in waiting if made if all(waiting[rank][:1] == [made[0]] for rank in made[0])}
        assert ready, f"ranks wait for each other: {[made[:1] for made in waiting]}"
        for made in waiting:
            if made and made[0] in ready:
                made.pop(0)


def test_uses_whose_order_may_differ_between_ranks_have_groups_of_their_own(monkeypatch):
    """Stages, bridges, gradients, layers and the sum of a step: one communicator of NCCL is one queue."""
    overrides = ("modules.images.layout.dp=2", "modules.language.layout.pp=2", "modules.language.layout.dp=2")
    layout = resolve(load("vlm_digits", overrides)).layout
    with one_rank(monkeypatch, layout.language.first_rank, layout.world_size):
        groups = build_groups(layout)
        pgs, (bridge,) = groups.collections["language"], groups.bridges.values()
        assert dist.get_process_group_ranks(pgs.pp) == dist.get_process_group_ranks(pgs.embd)
        apart = [dist.group.WORLD, pgs.pp, pgs.embd, pgs.dp_cp, pgs.mp, bridge]
        assert len({id(group) for group in apart}) == len(apart)
        assert pgs.dp is pgs.dp_cp, "the same ranks for the same purpose"
        assert pgs.tp is pgs.cp is pgs.ep is pgs.expt_tp is pgs.pos_embd, "this rank alone"


def test_modules_on_the_same_ranks_have_groups_of_their_own(monkeypatch):
    """Gradients of one are summed while the other computes, in an order that depends on its samples."""
    layout = resolve(
        load("vlm_digits", ("placement.mode=shared", "modules.images.layout.dp=2", "modules.language.layout.dp=2"))
    ).layout
    with one_rank(monkeypatch, 0, 2):
        groups = build_groups(layout)
        images, language = groups.collections["images"], groups.collections["language"]
        assert images.dp is not language.dp
        assert dist.get_process_group_ranks(images.dp) == dist.get_process_group_ranks(language.dp) == [0, 1]


def test_groups_of_a_cuda_run_have_nccl_alone(monkeypatch):
    layout = layout_of(64)
    asked = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: asked.append(dist.get_process_group_ranks(group)))
    with one_rank(monkeypatch, layout.language.first_rank, 64):
        new_group, backends = dist.new_group, []

        def fake(ranks, backend=None, **options):
            backends.append(backend)
            return new_group(ranks, **options)

        monkeypatch.setattr(dist, "new_group", fake)
        groups = build_groups(layout)
        monkeypatch.setattr(dist, "new_group", new_group)
        assert set(backends) == {"nccl"}
        # All ranks of a group come to its first message, before some of them alone have one.
        between = [groups.collections["language"].pp, *groups.bridges.values()]
        assert asked == [dist.get_process_group_ranks(group) for group in between]


def test_groups_over_gloo_have_none_for_bridges(monkeypatch):
    """The world's, which nothing refers to: a rank that fails must not leave others waiting."""
    monkeypatch.setattr(device, "backend_of_groups", lambda: None)
    layout = resolve(load("vlm_digits", ("modules.images.layout.dp=2",))).layout
    assert layout.edges and all(not built(monkeypatch, layout, rank)[0].bridges for rank in range(layout.world_size))


def test_torch_names_a_group_by_what_else_its_members_are_in(monkeypatch):
    """The names of `OwnGroups` are not needed any more if this fails."""
    names = []
    for before in ([], [[0, 1]]):
        with one_rank(monkeypatch, 0, 4):
            for ranks in before:
                dist.new_group(ranks, use_local_synchronization=True)
            names.append(dist.new_group([0, 2], use_local_synchronization=True).group_name)
    assert names[0] != names[1]


def test_members_of_a_group_give_it_one_name_and_no_other_group_has_it(monkeypatch):
    for overrides in SMALL.values():
        layout = resolve(load("vlm_digits", overrides)).layout
        everyones: dict[tuple[str, int], set[tuple[int, ...]]] = {}
        members: dict[str, int] = {}
        for rank in range(layout.world_size):
            with one_rank(monkeypatch, rank, layout.world_size):
                build_groups(layout)
                for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
                    if group is not dist.group.WORLD:
                        everyones.setdefault(group.group_name, set()).add(tuple(ranks))
                        members[group.group_name] = members.get(group.group_name, 0) + 1
        assert all(len(each) == 1 for each in everyones.values()), "a name means the same ranks everywhere"
        assert all(members[name] == len(next(iter(each))) for name, each in everyones.items()), "all meet under it"


def test_megatron_cores_grid_makes_all_groups_of_an_axis(monkeypatch):
    """`OwnGrid` is not needed any more if this fails."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    monkeypatch.setitem(os.environ, "WORLD_SIZE", "8")
    with one_rank(monkeypatch, 0, 8):
        asked = []
        monkeypatch.setattr(
            dist, "new_subgroups_by_enumeration", lambda every, **_: asked.append(every) or (None, None)
        )
        HyperCommGrid([2, 4], ["tp", "dp"]).create_pg("tp")
        assert asked == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
