"""Write the report that `mimo-train hang` and the watchdog print."""

import time
from collections.abc import Callable
from pathlib import Path

from mimo_train.flight.blame import Verdict, judge, message_name, place_name
from mimo_train.flight.file_format import REPORT
from mimo_train.flight.read import ALIVE, GONE, STOPPED, Rank, newest_start, process, read_ranks, start_time, state_of

PAUSE = 1.3
"""Seconds between two readings; a rank writes a heartbeat every half second."""
MOST_ROWS = 64
"""Most ranks to list; larger runs list only ranks that wait or are to blame."""
MOST_FRAMES = 14
ENDED = "the run is ended"
"""Last line of a report by a watchdog that ends the run instead of restarting inside the process."""
OUR_CODE = ("mimo_train/", "/data/", "encoders/")


def look(
    folder: Path,
    sleep: Callable[[float], None] = time.sleep,
    since: float = 0.0,
    beat: Callable[[], object] | None = None,
) -> Verdict:
    """Read all ranks of a start twice and return the verdict.

    Args:
        folder: folder of the start, see `newest_start`.
        sleep: called between the readings.
    """
    first = read_ranks(folder, since=since, beat=beat)
    sleep(PAUSE)
    second = read_ranks(folder, since=since, beat=beat)
    states = {number: state_of(first.get(number, rank), rank) for number, rank in second.items()}
    return judge(first, second, states)


def report(run_dir: Path, verdict: Verdict | None = None) -> str:
    """Return the report of a live or dead run: the rank to blame with its stack, and what each rank does.

    Args:
        verdict: default: `look` at the newest start.

    Raises:
        UserError: the folder has no flight recorder files.
    """
    verdict = verdict or look(newest_start(run_dir))
    lines = [f"{run_dir}: {_summary(verdict)}"]
    lines += [f"to blame: {verdict.why}"] if verdict.blamed else []
    for number in verdict.blamed[:1]:
        rank = verdict.ranks.get(number)
        if rank is not None:
            lines += [f"  {line}" for line in (_doing(rank, verdict.states[number]), *_stack(rank))]
    many = verdict.world_size > MOST_ROWS
    lines += ["ranks:"]
    for number in range(verdict.world_size):
        if not many or number in verdict.blamed or number in verdict.waits:
            lines.append(f"  {_row(verdict, number)}")
        if len(lines) > 2 * MOST_ROWS:
            lines.append(f"  ... and more, of {verdict.world_size}")
            break
    lines += _launchers(verdict)
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
        if (folder / REPORT).stat().st_mtime < start_time(folder):
            return None  # from an earlier start of the same name
        text = (folder / REPORT).read_text(errors="replace").rstrip()
    except OSError:
        return None
    if not text.endswith(f"\n{ENDED}"):
        return None
    text = text.removesuffix(f"\n{ENDED}")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / REPORT).stat().st_mtime))
    return f"the run hung, and its watchdog (run.hang_report_seconds) reported at {when}:\n{text}"


def _summary(verdict: Verdict) -> str:
    states = [verdict.states[rank] for rank in verdict.ranks]
    over = sum(rank.is_over for rank in verdict.ranks.values())
    words = [f"{verdict.world_size} rank{'s' * (verdict.world_size != 1)}"]
    words += [f"{states.count(state)} {state}" for state in sorted(set(states))]
    words += [f"{over} at the end of the run"] if over else []
    if verdict.progress:
        words.append(f"{len(verdict.progress)} making progress")
    if not verdict.blamed:
        words.append("nobody is to blame")
    return ", ".join(words)


def _row(verdict: Verdict, number: int) -> str:
    rank = verdict.ranks.get(number)
    if rank is None:
        return f"rank {number}: has not begun: no flight recorder file"
    edges = verdict.waits.get(number, [])
    why = dict.fromkeys(edge.why for edge in edges)
    on = ", ".join(str(edge.on) for edge in edges[:8]) + (", ..." if len(edges) > 8 else "")
    wait = f"; waits for rank{'s' * (len(edges) > 1)} {on}: {'; '.join(why)}" if edges else ""
    moves = ", makes progress" if number in verdict.progress else ""
    return f"rank {number} (process {rank.pid} on {rank.host}, {verdict.states[number]}{moves}): " + (
        _doing(rank, verdict.states[number]) + wait
    )


def _doing(rank: Rank, state: str) -> str:
    """Return the phase, its duration, step, place, and what the rank reads or waits for."""
    now = rank.beat_at if state == GONE else rank.now
    words = [f"step {rank.step}" if rank.step else "", " > ".join(rank.phases) or "start"]
    last = rank.frames[-1] if rank.frames else None
    if last is not None:
        words.append(f"for {max(0.0, now - last.at):.1f} s")
        words.append(place_name(rank, last))
        if rank.wait is not None:
            words.append(f"in {message_name(rank, rank.wait)}")
    if rank.reading:
        words.append(f"reads {rank.reading}")
    if state != ALIVE:
        seen = time.strftime("%H:%M:%S", time.localtime(rank.seen_at))
        words.append(f"{'stopped since' if state == STOPPED else 'last seen at'} {seen}")
    if rank.error:
        words.append(f"error: {rank.error}")
    return ", ".join(word for word in words if word)


def _stack(rank: Rank) -> list[str]:
    """Return the innermost frames of the rank's threads, our code first, from its stack file."""
    try:
        text = rank.stack_file.read_text(errors="replace")
    except OSError:
        return []
    threads = [block for block in text.split("\n\n") if "flight/watchdog.py" not in block]
    threads.sort(key=lambda block: not any(folder in block for folder in OUR_CODE))
    return [line for block in threads for line in block.splitlines()[: MOST_FRAMES // 2]][:MOST_FRAMES]


def _launchers(verdict: Verdict) -> list[str]:
    launchers = {rank.launcher for rank in verdict.ranks.values() if rank.here and rank.launcher}
    alive = any(state == ALIVE for state in verdict.states.values())
    return [f"the launcher (process {pid}) is gone" for pid in sorted(launchers) if alive and process(pid) is None]
