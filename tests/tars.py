"""Shards made by hand."""

import io
import tarfile
from collections.abc import Iterable
from itertools import batched, chain
from pathlib import Path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """A shard of these members, (name, bytes) in order; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def in_parts(shards: Iterable[Path], samples: int, folder: Path) -> int:
    """The samples of shards, in their order, as shards `part-000000.tar` and so on of so many each; their number."""
    of_samples: dict[str, list[tuple[str, bytes]]] = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None, member.name
                of_samples.setdefault(member.name.partition(".")[0], []).append((member.name, content.read()))
    parts = [*batched(of_samples.values(), samples)]
    for number, part in enumerate(parts):
        write_tar(folder / f"part-{number:06d}.tar", chain.from_iterable(part))
    return len(parts)


def standing_still(folder: Path, parts: int, at: int, where: str = "true") -> str:
    """A command for `pipe:` that gives shards of `in_parts`, but stands still before number `at`, until there is a file
    `go` in the folder.

    Args:
        where: a condition of the shell, for this too.
    """
    wait = f"while [ ! -e {folder}/go ]; do sleep 0.05; done"
    return f"n={{000000..{parts - 1:06d}}}; if [ $n = {at:06d} ] && {where}; then {wait}; fi; cat {folder}/part-$n.tar"
