"""Find out which ranks wait for which, and which rank is to blame first.

A rank that waits for collective number n of a group waits for the members that have issued fewer; one that waits for a
message waits for the other side of the channel. Following these edges leads to ranks that wait for nobody. Of these, a
rank that is gone, stopped or silent is to blame before a live one, and a live one only if it makes no progress. If
ranks wait in a circle, the one furthest in the run has skipped something. If ranks issued different collectives under
one number, the odd one out is to blame; of two, the one in the later phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mimo_train.flight import file_format
from mimo_train.flight.file_format import DIRECTIONS, OPERATIONS, PHASES, RECEIVE, SEND
from mimo_train.flight.read import ALIVE, GONE, Event, Rank


class Edge(NamedTuple):
    """A rank that another rank waits for, and why."""

    on: int
    why: str


@dataclass(frozen=True)
class Verdict:
    """The verdict from two readings of all ranks.

    Attributes:
        ranks: the second reading.
        blamed: ranks, the first to blame first; empty if all make progress.
        why: the reason for `blamed`.
        waits: edges by waiting rank.
        progress: ranks that made progress between the readings.
    """

    ranks: Mapping[int, Rank]
    states: Mapping[int, str]
    world_size: int
    progress: frozenset[int]
    waits: Mapping[int, list[Edge]]
    blamed: list[int] = field(default_factory=list)
    why: str = ""


def judge(first: Mapping[int, Rank], second: Mapping[int, Rank], states: Mapping[int, str]) -> Verdict:
    """Return the verdict on a run.

    Args:
        first, second: two readings of its ranks.
        states: state of every rank in `second`, see `state_of`.
    """
    world = max((rank.world_size for rank in second.values()), default=0)
    progress = frozenset(
        number
        for number, rank in second.items()
        if states[number] == ALIVE
        and number in first
        and (rank.events, rank.progressed_at) != (first[number].events, first[number].progressed_at)
    )
    dead = all(state == GONE for state in states.values()) and not all(r.is_over for r in second.values())
    # In a dead run, each rank counts as still doing what it did last.
    seen = dict.fromkeys(states, ALIVE) if dead else states
    waits = {number: edges for number, rank in second.items() if (edges := _edges(rank, second, seen, world))}
    verdict = Verdict(second, states, world, progress, waits)
    cause = _unequal(second) or (_first_dead(verdict) if dead else _root(verdict) or _stuck(verdict))
    blamed, why = cause or ([], "")
    return Verdict(second, states, world, progress, waits, blamed, why)


def message_name(rank: Rank, event: Event) -> str:
    """Return a message in words: `allreduce #7 of language.tp [2, 3]`, `send #3 to rank 1`."""
    group = rank.groups.get(event.group)
    operation = OPERATIONS[event.what] if event.what < len(OPERATIONS) else "?"
    where = str(group) if group else "?"
    if operation in ("send", "recv"):
        return f"{operation} #{event.message} {'to' if operation == 'send' else 'from'} rank {event.peer}"
    return f"{operation.strip('_')} #{event.message} of {where}"


def _edges(rank: Rank, ranks: Mapping[int, Rank], states: Mapping[int, str], world: int) -> list[Edge]:
    if states[rank.rank] != ALIVE or rank.is_over:
        return []
    event = rank.wait
    if event is None and rank.queued:
        return _queued_edges(rank, ranks)
    if event is None:
        if rank.phases[:1] != ("join",):
            return []
        late = (one for one in range(world) if one not in ranks or ranks[one].phases[:1] == ("start",))
        gone = (one for one in ranks if states[one] != ALIVE)
        return [Edge(one, "to join the processes of the run") for one in sorted({*late, *gone}) if one != rank.rank]
    group = rank.groups.get(event.group)
    if group is None:
        return []
    why = message_name(rank, event)
    if OPERATIONS[event.what] == "recv_anysource":
        return []
    if event.peer < 0:
        members = [one for one in group.ranks if one != rank.rank]
        behind = [one for one in members if one not in ranks or ranks[one].issued(group.name, -1, 0) < event.message]
        # All have issued it: a rank that stopped inside holds up the others.
        return [Edge(one, why) for one in behind or [one for one in members if states.get(one) != ALIVE]]
    back = RECEIVE if OPERATIONS[event.what] == "send" else SEND
    peer = ranks.get(event.peer)
    if peer is None or states[event.peer] != ALIVE or peer.issued(group.name, rank.rank, back) < event.message:
        return [Edge(event.peer, why)]
    return []


def _queued_edges(rank: Rank, ranks: Mapping[int, Rank]) -> list[Edge]:
    """Return edges to ranks that have not issued a message yet; the waiting rank's host runs ahead of its device."""
    edges, groups = [], {group.name: group for group in rank.groups.values()}
    for (name, peer, direction), last in rank.last.items():
        event = Event(
            0, last.at, file_format.ISSUE, last.operation, 0, 0, -1, 0, peer, last.number, last.nbytes, last.step
        )
        others = [peer] if peer >= 0 else [one for one in groups[name].ranks if one != rank.rank]
        there = (name, rank.rank if peer >= 0 else -1, {SEND: RECEIVE, RECEIVE: SEND}.get(direction, 0))
        number = next(number for number, group in rank.groups.items() if group.name == name)
        why = message_name(rank, event._replace(group=number))
        edges += [Edge(one, why) for one in others if one not in ranks or ranks[one].issued(*there) < last.number]
    return edges


def _roots(waits: Mapping[int, list[Edge]]) -> tuple[dict[int, set[int]], dict[tuple[int, ...], set[int]]]:
    """Return the ranks that wait for nobody, and the cycles, each with all ranks that wait for it in the end."""
    roots: dict[int, set[int]] = {}
    circles: dict[tuple[int, ...], set[int]] = {}
    for start in waits:
        path, seen, todo = list[int](), set[int](), [(start, 0)]
        while todo:  # depth first; `path` leads to the current rank
            rank, depth = todo.pop()
            del path[depth:]
            if rank in path:
                circles.setdefault(tuple(sorted(path[path.index(rank) :])), set()).add(start)
                continue
            if rank in seen:
                continue
            seen.add(rank)
            path.append(rank)
            if rank not in waits:
                roots.setdefault(rank, set()).add(start)
            todo += [(edge.on, depth + 1) for edge in waits[rank]] if rank in waits else []
    return roots, circles


def _root(verdict: Verdict) -> tuple[list[int], str] | None:
    ranks, states, waits = verdict.ranks, verdict.states, verdict.waits
    roots, circles = _roots(waits)
    for rank in range(verdict.world_size):  # including those that nobody waits for yet
        if rank in ranks and states[rank] != ALIVE and not ranks[rank].is_over:
            roots.setdefault(rank, set())
    if dead := [rank for rank in roots if rank not in ranks or states[rank] != ALIVE]:
        # Of several dead ranks blame the one furthest behind: the others may have followed it.
        dead.sort(
            key=lambda rank: (rank in ranks, states.get(rank) == GONE, -len(roots[rank]), _place(ranks.get(rank)))
        )
        missing = [rank for rank in dead if rank not in ranks]
        if missing and all(rank.phases[:1] in (("start",), ("join",)) for rank in ranks.values()):
            return missing, f"{_ranks(missing)} never began: no process has opened a flight recorder file"
        first = next((rank for rank in dead if rank in ranks), dead[0])
        if first not in ranks:
            return [first], f"rank {first} has no flight recorder file"
        said = f" ({ranks[first].error})" if ranks[first].error else ""
        return [first], f"rank {first} is {states[first]}{said}{_followers(roots[first], first)}"
    still = sorted((rank for rank in roots if rank not in verdict.progress), key=lambda rank: (-len(roots[rank]), rank))
    if still:
        why = f"rank {still[0]} waits for no rank and makes no progress{_followers(roots[still[0]], still[0])}"
        return [still[0]], why
    if circles and not roots:
        circle = max(circles, key=lambda one: len(circles[one]))
        ahead = max(circle, key=lambda rank: _place(ranks[rank]))
        return [ahead], (
            f"{_ranks(circle)} wait for each other; rank {ahead} is furthest, so that it has left out a message that "
            "another waits for"
        )
    return None


def _first_dead(verdict: Verdict) -> tuple[list[int], str] | None:
    """Blame a rank of a dead run: one with an error, else one that others waited for, else the first to end."""
    ranks = verdict.ranks
    failed = [rank for rank in ranks if ranks[rank].error]
    if failed:
        first = min(failed, key=lambda rank: _last_seen(ranks[rank]))
        return [first], f"rank {first} failed: {ranks[first].error}"
    roots, _ = _roots(verdict.waits)
    left = [rank for rank in roots if rank in ranks and not ranks[rank].is_over] or [
        rank for rank in ranks if not ranks[rank].is_over
    ]
    first = min(left, key=lambda rank: _last_seen(ranks[rank]))
    return [first], f"rank {first} ended without an error of its own{_followers(roots.get(first, set()), first, 'ed')}"


def _last_seen(rank: Rank) -> float:
    return rank.beat_at + rank.offset


_OF_ANOTHER = ".lock"
"""Suffix of the file that a rank reads while another process indexes its shards (`data.index.index_file`)."""


def _stuck(verdict: Verdict) -> tuple[list[int], str] | None:
    """Blame live ranks that make no progress and wait for no rank."""
    alive = [rank for rank in verdict.ranks if verdict.states[rank] == ALIVE and not verdict.ranks[rank].is_over]
    still = [rank for rank in alive if rank not in verdict.progress and rank not in verdict.waits]
    if not still or verdict.progress:
        return None
    still = [rank for rank in still if not verdict.ranks[rank].reading.endswith(_OF_ANOTHER)] or still
    one = len(still) == 1
    return still, f"{_ranks(still)} {'waits' if one else 'wait'} for no rank and make{'s' if one else ''} no progress"


def _unequal(ranks: Mapping[int, Rank]) -> tuple[list[int], str] | None:
    """Blame the first collective of a group at which ranks made different calls."""
    by_group: dict[str, dict[int, dict[int, Event]]] = {}
    for rank in ranks.values():
        for event in rank.ring:
            if event.kind == file_format.ISSUE and event.peer < 0 and event.group in rank.groups:
                of_group = by_group.setdefault(rank.groups[event.group].name, {})
                if OPERATIONS[event.what] not in ("send", "recv", "recv_anysource"):
                    of_group.setdefault(event.message, {})[rank.rank] = event
    for name, messages in by_group.items():
        for number in sorted(messages):
            labels = {rank: (one.what, one.nbytes, one.step) for rank, one in messages[number].items()}
            many = [*labels.values()]
            if len(set(many)) > 1:
                odd = max(labels, key=lambda rank: (-many.count(labels[rank]), *_last_place(ranks[rank], name)))
                calls = "; ".join(
                    f"{OPERATIONS[what].strip('_')} of {nbytes} bytes in step {step} on {_ranks(who)}"
                    for (what, nbytes, step) in sorted(set(many))
                    if (who := [rank for rank in labels if labels[rank] == (what, nbytes, step)])
                )
                group = next(g for g in ranks[odd].groups.values() if g.name == name)
                return [odd], (
                    f"collective #{number} of {group} is not the same on all ranks: {calls}; rank {odd} has left out a "
                    "call before, or called one too many"
                )
    return None


def _last_place(rank: Rank, group: str) -> tuple[int, int]:
    last = rank.last.get((group, -1, 0))
    return (last.step, last.phase) if last else (0, 0)


def _place(rank: Rank | None) -> tuple:
    """Return a sortable measure of how far a rank is in the run."""
    if rank is None:
        return ()
    event = rank.frames[-1] if rank.frames else None
    phase = max((PHASES.index(name) for name in rank.phases if name in PHASES), default=0)
    return (rank.step, phase, event.direction if event else 0, event.microbatch if event else 0)


def _followers(ranks: set[int], root: int, past: str = "") -> str:
    others = sorted(ranks - {root})
    verb = f"wait{past or ('s' if len(others) == 1 else '')}"
    return f"; {_ranks(others)} {verb} for it" if others else ""


def _ranks(ranks: object) -> str:
    numbers = sorted(ranks)  # type: ignore[call-overload]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:12]))
    return f"ranks {shown}" + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")


def place_name(rank: Rank, event: Event) -> str:
    """Return where in the module graph an event belongs (`images->language, microbatch 1, backward`), or ""."""
    words = [rank.places.get(event.place, "")]
    words += [f"microbatch {event.microbatch}"] if event.microbatch >= 0 else []
    words += [DIRECTIONS.get(event.direction, "")]
    return ", ".join(word for word in words if word)
