"""What a rank finds in a save is raised on every rank: errors of users, and with more weight bugs."""

import errno
import os
from pathlib import Path

from mimo_train.checkpoint.save import raise_together
from tests.dist.ranks import run_ranks

FULL = OSError(errno.ENOSPC, "No space left on device")


def _raised(cases: list[tuple]) -> list[tuple[list[str], str]]:
    """Of each case, which has an error for every rank: the classes of what this rank raises, and its text."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for case in cases:
        try:
            raise_together(case[int(os.environ["RANK"])], Path("/run"))
            found.append(([], ""))
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            found.append((kinds + ["is final"] * getattr(error, "is_final", False), str(error)))
    dist.destroy_process_group()
    return found


def test_a_bug_on_one_rank_is_never_a_failed_save_on_another():
    from mimo_train.checkpoint.format.write import NotFinite

    bug = TypeError("no such argument")
    cases = [(None, None), (None, FULL), (NotFinite("language weight"), None), (None, bug), (FULL, bug), (bug, FULL)]
    ranks = run_ranks(_raised, 2, cases)
    nothing, full, spoilt, *bugs = zip(*ranks, strict=True)
    assert nothing == (([], ""), ([], ""))
    for (peer, text), (own, same) in (full, spoilt[::-1]):
        assert text == same and "PeersError" in peer and "PeersError" not in own
        assert "SaveFailed" in peer and "SaveFailed" in own
    assert "No space left" in full[0][1] and "is final" not in full[0][0]
    assert all("is final" in kinds for kinds, _ in spoilt)
    for number, (first, second) in enumerate(bugs):
        (peer, text), (own, _) = (second, first) if number == 2 else (first, second)
        assert own[0] == "TypeError"
        assert "PeersError" in peer and "SaveFailed" not in peer, "it would go on without the other rank"
        assert text == "TypeError: no such argument"
