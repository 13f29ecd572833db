"""A folder of wheels and its manifest: what belongs there, with checksums; large files in pieces. Imports no package.

pieces.py FOLDER          says what is missing or damaged
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

MANIFEST = "wheels.json"
BLOCK = 2**20


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path) -> dict[str, Any]:
    """A file as the manifest has it."""
    return {"name": path.name, "size": path.stat().st_size, "sha256": checksum(path)}


def split(path: Path, most: int) -> list[dict[str, Any]]:
    """Cuts a file into pieces of at most `most` bytes beside it and removes it; returns the pieces in order."""
    size = path.stat().st_size
    count = -(-size // most)
    pieces = []
    with path.open("rb") as whole:
        for number in range(count):
            piece = path.with_name(f"{path.name}.{number + 1:03d}-of-{count:03d}")
            _copy(whole, piece, min(most, size - number * most))
            pieces.append(describe(piece))
    path.unlink()
    return pieces


def _copy(source: Any, target: Path, size: int) -> None:
    with target.open("wb") as file:
        while size:
            block = source.read(min(BLOCK, size))
            file.write(block)
            size -= len(block)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; an empty one for wheels that were put there by hand."""
    path = folder / MANIFEST
    if not path.exists():
        return {"files": [], "expected": {}, "build": [], "sources": []}
    return json.loads(path.read_text())


def faults(folder: Path) -> list[str]:
    """Files and pieces of the manifest that are not there, or are not what they were."""
    found = []
    for file in read_manifest(folder)["files"]:
        parts = file.get("pieces") or [file]
        for number, part in enumerate(parts, 1):
            path, which = folder / part["name"], f", piece {number} of {len(parts)}" if len(parts) > 1 else ""
            if not path.exists():
                found.append(f"{part['name']} is missing{which}")
            elif path.stat().st_size != part["size"]:
                found.append(f"{part['name']} has {path.stat().st_size} bytes, not {part['size']}{which}")
            elif checksum(path) != part["sha256"]:
                found.append(f"{part['name']} is damaged: its checksum is another{which}")
    return found


def join(folder: Path, target: Path) -> list[Path]:
    """Puts the files that are in pieces together again, in `target`, and returns them. The pieces stay."""
    joined = []
    for file in read_manifest(folder)["files"]:
        if file.get("pieces"):
            target.mkdir(parents=True, exist_ok=True)
            with (target / file["name"]).open("wb") as whole:
                for part in file["pieces"]:
                    with (folder / part["name"]).open("rb") as piece:
                        while block := piece.read(BLOCK):
                            whole.write(block)
            joined.append(target / file["name"])
    return joined


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every file is there and is what it was")
    sys.exit(bool(lines))
