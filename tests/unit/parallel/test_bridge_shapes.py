"""What each rank sends to whom, from counts alone."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_train.layout.ranks import ModuleLayout
from mimo_train.parallel.bridge.shapes import StepShapes, Turns, parts_of, replica_ranks, routes


def module(name: str, tp: int, dp: int, first_rank: int) -> ModuleLayout:
    """A module in one stage."""
    return ModuleLayout(name, tp=tp, pp=1, dp=dp, cp=1, ep=1, sp=False, first_rank=first_rank)


def slices(samples: int, dp: int) -> list[tuple[int, int]]:
    """Samples of each replica."""
    share = samples // dp
    return [(replica * share, (replica + 1) * share) for replica in range(dp)]


def test_parts_by_hand():
    counts = [3, 0, 2, 1]
    rows, parts = parts_of(counts, (0, 4), [(7, 0, 2), (8, 2, 4)])
    assert rows == 6
    assert [(part.peer, part.first, part.last) for part in parts] == [(7, 0, 3), (8, 3, 6)]
    rows, parts = parts_of(counts, (2, 4), [(5, 0, 4)])
    assert rows == 3 and [(part.peer, part.first, part.last) for part in parts] == [(5, 0, 3)]


def test_samples_without_rows_cause_no_message():
    assert parts_of([0, 0, 0, 4], (0, 2), [(1, 0, 4)]) == (0, [])


@given(
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 2), (1, 6), (6, 4)]),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
)
@settings(max_examples=100)
def test_every_row_arrives_once_and_in_order(sizes, counts):
    """What the senders cut fits what the receivers expect, for any pair of sizes, and nothing is lost."""
    source_dp, dest_dp = sizes
    sources, dests = slices(12, source_dp), slices(12, dest_dp)
    for dest, own in enumerate(dests):
        rows, parts = parts_of(counts, own, [(index, *span) for index, span in enumerate(sources)])
        assert rows == sum(counts[own[0] : own[1]])
        assert all(before.last == after.first for before, after in pairwise(parts))
        assert sum(part.last - part.first for part in parts) == rows
        for part in parts:
            _, sent = parts_of(counts, sources[part.peer], [(index, *span) for index, span in enumerate(dests)])
            matching = next(other for other in sent if other.peer == dest)
            assert matching.last - matching.first == part.last - part.first


@pytest.mark.parametrize(("source_tp", "dest_tp"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_taking_rank_has_one_source_in_each_replica(source_tp, dest_tp):
    source = module("images", source_tp, 2, 0)
    dest = module("language", dest_tp, 3, source.size)
    giving, taking = replica_ranks(source, source.pp - 1), replica_ranks(dest, 0)
    for sender, receiver, pairs in ((source, dest, routes(giving, taking)), (dest, source, routes(taking, giving))):
        for rank in receiver.ranks:
            sources = [giving for giving, taking in pairs if taking == rank]
            assert len(sources) == sender.dp
            assert len({(giving - sender.first_rank) // sender.tp for giving in sources}) == sender.dp


def test_every_step_starts_with_its_first_microbatch():
    shapes = StepShapes()
    turns = Turns(shapes)
    shapes.begin({"images": [[3], [4]]}, {"images": [[3], [4]]})
    assert [turns.next(1), turns.next(1), turns.next(2)] == [0, 1, 0]
    shapes.begin({"images": [[1]]}, {"images": [[5]]})
    assert shapes.counts == {"images": [[1]]} and shapes.loads == {"images": [[5]]}
    assert [turns.next(1), turns.next(2)] == [0, 0]
