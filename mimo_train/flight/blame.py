"""Find out which ranks wait for which and which rank is to blame, and report it.

A rank that waits for collective number n of a group waits for the members that have issued fewer; one that waits for a
message waits for the other side of the channel. Following these edges leads to ranks that wait for nobody. Of these, a
rank that is gone, stopped or silent is to blame before a live one, and a live one only if it makes no progress. If
ranks wait in a circle, the one furthest in the run has skipped something. If ranks issued different collectives under
one number, the odd one out is to blame; of two, the one in the later phase.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mimo_train.flight.file_format import DIRECTIONS, ISSUE, OPERATIONS, PHASES, RECEIVE, REPORT, SEND, Event, Last
from mimo_train.flight.read import (
    ALIVE,
    GONE,
    STOPPED,
    Group,
    Rank,
    newest_start,
    process,
    read_ranks,
    start_time,
    state_of,
)

PAUSE = 1.3
"""Seconds between two readings; a rank writes a heartbeat every half second."""
MOST_ROWS = 64
"""Most ranks to list; larger runs list only ranks that wait or are to blame."""
MOST_FRAMES = 14
ENDED = "the run is ended"
"""Last line of a report by a watchdog that ends the run instead of restarting inside the process."""
OUR_CODE = ("mimo_train/", "/data/", "encoders/")
INDEXING = ".lock"
"""Suffix of the file that a rank reads while another process indexes its shards (`data.index.index_file`)."""


class Edge(NamedTuple):
    """A rank that another rank waits for, and the message."""

    on: int
    message: str


@dataclass
class Verdict:
    """The verdict from two readings of all ranks.

    Attributes:
        ranks: the second reading.
        progress: ranks that made progress between the readings.
        waits: edges by waiting rank.
        blamed: ranks, the first to blame first; empty if all make progress.
        reason: the reason for `blamed`.
    """

    ranks: Mapping[int, Rank]
    states: Mapping[int, str]
    world_size: int
    progress: frozenset[int]
    waits: dict[int, list[Edge]]
    blamed: list[int] = field(default_factory=list)
    reason: str = ""


def look(
    folder: Path,
    sleep: Callable[[float], None] = time.sleep,
    since: float = 0.0,
    beat: Callable[[], object] = lambda: None,
) -> Verdict:
    """Read all ranks of a start twice and return the verdict.

    Args:
        folder: folder of the start, see `newest_start`.
        sleep: called between the readings.
        since, beat: see `read_ranks`.
    """
    first = read_ranks(folder, since, beat)
    sleep(PAUSE)
    ranks = read_ranks(folder, since, beat)
    states = {number: state_of(first.get(number, rank), rank) for number, rank in ranks.items()}
    world = max((rank.world_size for rank in ranks.values()), default=0)
    progress = frozenset(
        number
        for number, rank in ranks.items()
        if states[number] == ALIVE
        and number in first
        and (rank.events, rank.progressed_at) != (first[number].events, first[number].progressed_at)
    )
    dead = all(state == GONE for state in states.values()) and not all(rank.is_over for rank in ranks.values())
    # In a dead run, each rank counts as still doing what it did last.
    seen = dict.fromkeys(states, ALIVE) if dead else states
    waits = {number: edges for number, rank in ranks.items() if (edges := _edges(rank, ranks, seen, world))}
    verdict = Verdict(ranks, states, world, progress, waits)
    cause = _unequal(ranks) or (_first_dead(verdict) if dead else _root(verdict) or _stuck(verdict))
    verdict.blamed, verdict.reason = cause or ([], "")
    return verdict


# -- who waits for whom


def _edges(rank: Rank, ranks: Mapping[int, Rank], states: Mapping[int, str], world: int) -> list[Edge]:
    if states[rank.rank] != ALIVE or rank.is_over:
        return []
    event = rank.wait
    if event is None and rank.queued:
        return _queued_edges(rank, ranks)
    if event is None:
        if rank.phases[:1] != ("join",):
            return []
        late = (number for number in range(world) if number not in ranks or ranks[number].phases[:1] == ("start",))
        gone = (number for number in ranks if states[number] != ALIVE)
        others = sorted({*late, *gone} - {rank.rank})
        return [Edge(number, "to join the processes of the run") for number in others]
    group = rank.groups.get(event.group)
    if group is None or OPERATIONS[event.what] == "recv_anysource":
        return []
    message = _message(group, event.what, event.message, event.peer)
    behind = _missing_members(rank.rank, group, event.what, event.message, event.peer, ranks)
    # All have issued it: a rank that stopped inside holds up the others.
    members = group.ranks if event.peer < 0 else (event.peer,)
    behind = behind or [number for number in members if number != rank.rank and states.get(number) != ALIVE]
    return [Edge(number, message) for number in behind]


def _queued_edges(rank: Rank, ranks: Mapping[int, Rank]) -> list[Edge]:
    """Return edges to ranks that have not issued a message yet; the waiting rank's host runs ahead of its device."""
    edges = []
    for last in rank.last.values():
        group = rank.groups[last.group]
        message = _message(group, last.operation, last.number, last.peer)
        behind = _missing_members(rank.rank, group, last.operation, last.number, last.peer, ranks)
        edges += [Edge(number, message) for number in behind]
    return edges


def _missing_members(
    rank: int, group: Group, operation: int, number: int, peer: int, ranks: Mapping[int, Rank]
) -> list[int]:
    """Return the other ranks of a message that have not issued it."""
    if peer < 0:
        others, channel = [other for other in group.ranks if other != rank], (group.name, -1, 0)
    else:
        others, channel = [peer], (group.name, rank, RECEIVE if OPERATIONS[operation] == "send" else SEND)
    return [other for other in others if other not in ranks or ranks[other].issued(*channel) < number]


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
            elif rank not in seen:
                seen.add(rank)
                path.append(rank)
                if rank not in waits:
                    roots.setdefault(rank, set()).add(start)
                todo += [(edge.on, depth + 1) for edge in waits.get(rank, ())]
    return roots, circles


# -- who is to blame

Cause = tuple[list[int], str]


def _root(verdict: Verdict) -> Cause | None:
    ranks, states, waits = verdict.ranks, verdict.states, verdict.waits
    roots, circles = _roots(waits)
    for rank in ranks:  # including those that nobody waits for yet
        if states[rank] != ALIVE and not ranks[rank].is_over:
            roots.setdefault(rank, set())
    missing = sorted(rank for rank in roots if rank not in ranks)
    if missing and all(rank.phases[:1] in (("start",), ("join",)) for rank in ranks.values()):
        return missing, f"{_names(missing)} never began: no process has opened a flight recorder file"
    if dead := [rank for rank in roots if rank in ranks and states[rank] != ALIVE]:
        # Of several dead ranks blame the one furthest behind: the others may have followed it.
        first = min(dead, key=lambda rank: (states[rank] == GONE, -len(roots[rank]), _place(ranks[rank])))
        error = f" ({ranks[first].error})" if ranks[first].error else ""
        return [first], f"rank {first} is {states[first]}{error}{_followers(roots[first], first)}"
    if missing:
        return missing[:1], f"rank {missing[0]} has no flight recorder file"
    still = sorted((rank for rank in roots if rank not in verdict.progress), key=lambda rank: (-len(roots[rank]), rank))
    if still:
        followers = _followers(roots[still[0]], still[0])
        return still[:1], f"rank {still[0]} waits for no rank and makes no progress{followers}"
    if circles and not roots:
        circle = max(circles, key=lambda circle: len(circles[circle]))
        ahead = max(circle, key=lambda rank: _place(ranks[rank]))
        return [ahead], (
            f"{_names(circle)} wait for each other; rank {ahead} is furthest, so that it has left out a message that "
            "another waits for"
        )
    return None


def _first_dead(verdict: Verdict) -> Cause:
    """Blame a rank of a dead run: one with an error, else one that others waited for, else the first to end."""
    ranks = verdict.ranks
    if failed := [rank for rank in ranks if ranks[rank].error]:
        first = min(failed, key=lambda rank: ranks[rank].seen_at)
        return [first], f"rank {first} failed: {ranks[first].error}"
    roots, _ = _roots(verdict.waits)
    unfinished = [rank for rank in ranks if not ranks[rank].is_over]
    first = min([rank for rank in unfinished if rank in roots] or unfinished, key=lambda rank: ranks[rank].seen_at)
    return [first], f"rank {first} ended without an error of its own{_followers(roots.get(first, set()), first, 'ed')}"


def _stuck(verdict: Verdict) -> Cause | None:
    """Blame live ranks that make no progress and wait for no rank."""
    alive = [rank for rank in verdict.ranks if verdict.states[rank] == ALIVE and not verdict.ranks[rank].is_over]
    still = [rank for rank in alive if rank not in verdict.progress and rank not in verdict.waits]
    if not still or verdict.progress:
        return None
    still = [rank for rank in still if not verdict.ranks[rank].reading.endswith(INDEXING)] or still
    verbs = "waits for no rank and makes" if len(still) == 1 else "wait for no rank and make"
    return still, f"{_names(still)} {verbs} no progress"


def _unequal(ranks: Mapping[int, Rank]) -> Cause | None:
    """Blame the first collective of a group at which ranks made different calls."""
    collectives: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for number, rank in ranks.items():
        for event in rank.ring:
            is_collective = event.peer < 0 and OPERATIONS[event.what] != "recv_anysource"
            if event.kind == ISSUE and is_collective and event.group in rank.groups:
                key = rank.groups[event.group].name, event.message
                collectives.setdefault(key, {})[number] = event.what, event.nbytes, event.step
    for (name, message), calls in sorted(collectives.items()):
        different = [*calls.values()]
        if len({*different}) == 1:
            continue

        odd = max(calls, key=lambda rank: (-different.count(calls[rank]), *_last_call(ranks[rank], name)))
        texts = "; ".join(
            f"{OPERATIONS[what].strip('_')} of {nbytes} bytes in step {step} on "
            + _names([rank for rank in calls if calls[rank] == (what, nbytes, step)])
            for what, nbytes, step in sorted({*different})
        )
        group = next(group for group in ranks[odd].groups.values() if group.name == name)
        return [odd], (
            f"collective #{message} of {group} is not the same on all ranks: {texts}; rank {odd} has left out a call "
            "before, or called one too many"
        )
    return None


def _last_call(rank: Rank, group: str) -> tuple[int, int]:
    last = rank.last.get((group, -1, 0), Last())
    return last.step, last.phase


def _place(rank: Rank) -> tuple[int, ...]:
    """Return a sortable measure of how far a rank is in the run."""
    event = rank.frames[-1] if rank.frames else Event()
    phase = max((PHASES.index(name) for name in rank.phases), default=0)
    return rank.step, phase, event.direction, event.microbatch


# -- the report


def report(run_dir: Path, verdict: Verdict | None = None) -> str:
    """Return the report of a live or dead run: the rank to blame with its stack, and what each rank does.

    Args:
        verdict: default: `look` at the newest start.

    Raises:
        UserError: the folder has no flight recorder files.
    """
    verdict = verdict or look(newest_start(run_dir))
    lines = [f"{run_dir}: {_summary(verdict)}"]
    lines += [f"to blame: {verdict.reason}"] if verdict.blamed else []
    for number in verdict.blamed[:1]:
        rank = verdict.ranks.get(number)
        if rank is not None:
            lines += [f"  {line}" for line in (_doing(rank, verdict.states[number]), *_stack(rank))]
    many = verdict.world_size > MOST_ROWS
    numbers = [n for n in range(verdict.world_size) if not many or n in verdict.blamed or n in verdict.waits]
    lines += ["ranks:", *(f"  {_row(verdict, number)}" for number in numbers[: 2 * MOST_ROWS])]
    lines += [f"  ... and more, of {verdict.world_size}"] if len(numbers) > 2 * MOST_ROWS else []
    launchers = {rank.launcher for rank in verdict.ranks.values() if rank.is_on_this_host and rank.launcher}
    if ALIVE in verdict.states.values():
        lines += [f"the launcher (process {pid}) is gone" for pid in sorted(launchers) if process(pid) is None]
    return "\n".join(lines)


def kept_report(folder: Path, verdict: Verdict) -> str | None:
    """Return the report that the watchdog wrote before it ended the ranks of a start.

    None if it wrote none, a rank still lives, or all ranks reached the end of the run.

    Args:
        folder: folder of the start.
    """
    if {ALIVE, STOPPED} & {*verdict.states.values()} or all(rank.is_over for rank in verdict.ranks.values()):
        return None
    try:
        written_at = (folder / REPORT).stat().st_mtime
        text = (folder / REPORT).read_text(errors="replace").rstrip()
    except OSError:
        return None
    if written_at < start_time(folder) or not text.endswith(f"\n{ENDED}"):  # of an earlier start of the same name
        return None
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_at))
    text = text.removesuffix(f"\n{ENDED}")
    return f"the run hung, and its watchdog (run.hang_report_seconds) reported at {when}:\n{text}"


def _summary(verdict: Verdict) -> str:
    states = [*verdict.states.values()]
    over = sum(rank.is_over for rank in verdict.ranks.values())
    words = [f"{verdict.world_size} rank{'s' * (verdict.world_size != 1)}"]
    words += [f"{states.count(state)} {state}" for state in sorted({*states})]
    words += [f"{over} at the end of the run"] if over else []
    words += [f"{len(verdict.progress)} making progress"] if verdict.progress else []
    words += [] if verdict.blamed else ["nobody is to blame"]
    return ", ".join(words)


def _row(verdict: Verdict, number: int) -> str:
    rank = verdict.ranks.get(number)
    if rank is None:
        return f"rank {number}: has not begun: no flight recorder file"
    state, edges, wait = verdict.states[number], verdict.waits.get(number, []), ""
    if edges:
        on = ", ".join(str(edge.on) for edge in edges[:8]) + (", ..." if len(edges) > 8 else "")
        wait = f"; waits for rank{'s' * (len(edges) > 1)} {on}: {'; '.join(dict.fromkeys(e.message for e in edges))}"
    moves = ", makes progress" if number in verdict.progress else ""
    return f"rank {number} (process {rank.pid} on {rank.host}, {state}{moves}): {_doing(rank, state)}{wait}"


def _doing(rank: Rank, state: str) -> str:
    """Return the phase, its duration, step, place in the module graph, and what the rank reads or waits for."""
    now = rank.beat_at if state == GONE else rank.now
    words = [f"step {rank.step}" if rank.step else "", " > ".join(rank.phases) or "start"]
    if rank.frames:
        last = rank.frames[-1]
        words += [f"for {max(0.0, now - last.at):.1f} s", rank.places.get(last.place, "")]
        words += [f"microbatch {last.microbatch}" if last.microbatch >= 0 else "", DIRECTIONS.get(last.direction, "")]
    if (wait := rank.wait) is not None:
        words.append(f"in {_message(rank.groups.get(wait.group), wait.what, wait.message, wait.peer)}")
    words.append(f"reads {rank.reading}" if rank.reading else "")
    if state != ALIVE:
        seen = time.strftime("%H:%M:%S", time.localtime(rank.seen_at))
        words.append(f"{'stopped since' if state == STOPPED else 'last seen at'} {seen}")
    words.append(f"error: {rank.error}" if rank.error else "")
    return ", ".join(word for word in words if word)


def _message(group: Group | None, operation: int, number: int, peer: int) -> str:
    """Return a message in words: `allreduce #7 of language.tp [2, 3]`, `send #3 to rank 1`."""
    name = OPERATIONS[operation]
    if name in ("send", "recv"):
        return f"{name} #{number} {'to' if name == 'send' else 'from'} rank {peer}"
    return f"{name.strip('_')} #{number} of {group or '?'}"


def _stack(rank: Rank) -> list[str]:
    """Return the innermost frames of the rank's threads, our code first, from its stack file."""
    try:
        text = rank.stack_file.read_text(errors="replace")
    except OSError:
        return []
    threads = [block for block in text.split("\n\n") if "flight/watchdog.py" not in block]
    threads.sort(key=lambda block: not any(folder in block for folder in OUR_CODE))
    return [line for block in threads for line in block.splitlines()[: MOST_FRAMES // 2]][:MOST_FRAMES]


def _followers(ranks: set[int], root: int, past: str = "") -> str:
    others = sorted(ranks - {root})
    verb = f"wait{past or ('s' if len(others) == 1 else '')}"
    return f"; {_names(others)} {verb} for it" if others else ""


def _names(ranks: Collection[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:12])) + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
