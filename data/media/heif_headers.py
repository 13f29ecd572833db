"""Size of a HEIC picture from its header (ISO/IEC 23008-12), without decoding it. Imports no torch.

A parser of our own, so that an index is the same wherever it is built, whatever is installed to decode with.
"""

from __future__ import annotations

from data.media.iso_boxes import Box, ReadAt, boxes_in, boxes_of_file, child, number

_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_AVIF = {b"avif", b"avis"}
_LARGEST_HEAD = 16 << 20  # bytes of what describes the pictures of a file
_MOST = 1 << 16


def is_heic(head: bytes) -> bool:
    """Whether a file is a HEIC picture, by its first bytes. AVIF pictures may have its brands too."""
    length = min(number(head, 0), len(head))
    brands = {head[at : at + 4] for at in (8, *range(16, length - 3, 4))}
    return head[4:8] == b"ftyp" and bool(brands & _HEIC) and not brands & _AVIF


def parse_heic_size(read: ReadAt, size: int) -> tuple[int, int] | None:
    """(height, width) in pixels of the primary picture, upright; None if there is none that we can read, or if the end
    of the file is missing. Never raises for bad bytes."""
    found = next((box for box in boxes_of_file(read, size) or () if box.name == b"meta"), None)
    if found is None or found.end - found.start > _LARGEST_HEAD:
        return None
    raw = read(found.start + 4, found.end - found.start - 4)  # behind version and flags
    primary, described = child(raw, b"pitm"), child(raw, b"iprp", b"ipco")
    if primary is None or described is None:
        return None
    long = raw[primary.start : primary.start + 1] != b"\0"
    item = number(raw, primary.start + 4, 4 if long else 2)
    properties = list(boxes_in(raw, described.start, described.end))
    height = width = 0
    for at in _associated(raw, item):
        if not 0 < at <= len(properties):
            continue
        name, start, _ = box = properties[at - 1]
        if name == b"ispe":
            height, width = number(raw, start + 8), number(raw, start + 4)
        elif name == b"clap":
            height, width = _cut(raw, box)
        elif name == b"irot" and raw[start : start + 1] in (b"\1", b"\3"):
            height, width = width, height
    return (height, width) if 0 < height < 1 << 31 and 0 < width < 1 << 31 else None


def _cut(raw: bytes, box: Box) -> tuple[int, int]:
    """(height, width) of what is cut out; zeros where they are no whole numbers."""
    width, of_width, height, of_height = (number(raw, box.start + at) for at in (0, 4, 8, 12))
    if not of_width or not of_height or width % of_width or height % of_height:
        return 0, 0
    return height // of_height, width // of_width


def _associated(raw: bytes, item: int) -> list[int]:
    """Numbers, from 1 on, of the properties of an item, in their order."""
    table = child(raw, b"iprp", b"ipma")
    if table is None:
        return []
    of_item = 4 if raw[table.start : table.start + 1] != b"\0" else 2
    of_number = 2 if number(raw, table.start + 1, 3) & 1 else 1
    at = table.start + 8
    for _ in range(min(number(raw, table.start + 4), _MOST)):
        if at >= table.end:
            break
        own, count = number(raw, at, of_item), number(raw, at + of_item, 1)
        at += of_item + 1
        if own == item:  # the first bit says whether it is essential
            mask = (1 << 8 * of_number - 1) - 1
            return [number(raw, at + of_number * place, of_number) & mask for place in range(count)]
        at += of_number * count
    return []
