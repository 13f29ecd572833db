"""A catalogue with right checksums that says what cannot be: an error that names it, or it is built again."""

import json
import random
import zlib

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from data.errors import DataError
from data.index import index_file
from data.index.catalogue import open_catalogue
from data.index.folder_file import catalogue_path
from data.index.shard_index import MEMBER, SAMPLE
from data.index.shards import find_shards
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image

NUMBERS = [-1, 0, 1, 3, 64, 2**16, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**31), -(2**63)]
VALUES = [None, True, -1, 1.5, "", "x", [], {}, [[]], ["x"], [[[], [], []]], {"0": 1}]
HEAD = 256


@pytest.fixture
def shards(tmp_path):
    for number in range(3):
        image = encode_image(8, 8 + number, "PNG")
        members = [("a.json", chat("?", "!")), ("a.png", image), ("b.txt", b"text"), ("c.jpg", b"x")]
        write_tar(tmp_path / f"s{number}.tar", members)
    return find_shards(str(tmp_path))


class Crafted:
    """A file of a catalogue that can be changed everywhere, and gets right checksums again."""

    def __init__(self, raw: bytes):
        self.meta = json.loads(raw[:HEAD])
        at = HEAD + self.meta["texts"]
        self.texts = json.loads(raw[HEAD:at])
        end = at + self.meta["shards"] * index_file._SHARD.itemsize
        self.table = np.frombuffer(raw[at:end], dtype=index_file._SHARD).copy()
        self._begin = end + -(end - at) % 64
        self.parts = bytearray(raw[self._begin :])
        self.places = [(int(row["at"]) - self._begin, row.copy()) for row in self.table]

    def set_rows(self, shard: int, number: int, name: str, value: int) -> None:
        """A field of a sample, or of a member."""
        at, row = self.places[shard]
        samples = (int(row["samples"]) + 1) * SAMPLE.itemsize
        kind, start, stop = (SAMPLE, at, at + samples) if name in SAMPLE.names else (MEMBER, at + samples, None)
        stop = stop or start + int(row["members"]) * MEMBER.itemsize
        rows = np.frombuffer(self.parts[start:stop], dtype=kind).copy()
        rows[name][number % len(rows)] = np.array(value).astype(rows.dtype[name])
        self.parts[start:stop] = rows.tobytes()

    def set_keys(self, shard: int, packed: bytes) -> None:
        """Other keys; longer ones take the place of the next shard's part."""
        at, row = self.places[shard]
        at += (int(row["samples"]) + 1) * SAMPLE.itemsize + int(row["members"]) * MEMBER.itemsize
        self.parts[at : at + len(packed)] = packed
        length = (int(row["samples"]) + 1) * SAMPLE.itemsize + int(row["members"]) * MEMBER.itemsize + len(packed)
        self.table["bytes"][shard] = length + -length % 64
        self.table["keys"][shard] = len(packed)

    def sealed(self) -> bytes:
        self.texts["check"] = xxh3_64_intdigest(bytes(self.parts))
        text = json.dumps(self.texts).encode()
        text += b" " * (-len(text) % 64)
        begin = HEAD + len(text) + self.table.nbytes + -self.table.nbytes % 64
        self.table["at"] += begin - self._begin
        whole = bytes(begin) + bytes(self.parts)
        for row in self.table:
            start = max(int(row["at"]), 0)
            row["check"] = xxh3_64_intdigest(whole[start : start + max(int(row["bytes"]), 0)])
        before = text + self.table.tobytes() + bytes(-self.table.nbytes % 64)
        meta = self.meta | {"texts": len(text), "bytes": len(whole)}
        meta.pop("check")
        line = json.dumps(meta | {"check": index_file._head_check(meta, before)}).encode()
        return line.ljust(HEAD - 1) + b"\n" + before + bytes(self.parts)


def told(shards) -> list:
    """All that a run asks a catalogue."""
    catalogue = open_catalogue(shards)
    found: list = [catalogue.contents()]
    for number in range(len(shards)):
        index = catalogue.index(number)
        rows = range(len(index))
        found.append([(index.key(row), index.members(row), index.record(row), index.bad_reason(row)) for row in rows])
        found.append((index.unread(), index.extensions(), index.num_bad))
        taken = catalogue.rows(np.full(len(index), number), np.arange(len(index)))
        found.append([taken.names[code] + taken.kinds[code] for code in taken.members["code"].tolist()])
        found.append((taken.firsts.tolist(), taken.members["offset"].tolist()))
    return found


def change(crafted: Crafted, generator: random.Random) -> None:
    shard, value = generator.randrange(3), generator.choice(NUMBERS)
    what = generator.randrange(6)
    if what == 0:
        names = ["at", "bytes", "samples", "members", "keys", "codes", "size", "mtime_ns"]
        name = generator.choice(names)
        crafted.table[name][shard] = value if generator.random() < 0.7 else crafted.table[name][shard] + value % 128
    elif what == 1:
        crafted.set_rows(shard, generator.randrange(5), generator.choice([*SAMPLE.names, *MEMBER.names]), value)
    elif what == 2:
        crafted.texts[generator.choice(["names", "tags", "codes"])] = generator.choice(VALUES)
    elif what == 3:
        name = generator.choice(["names", "codes"])
        crafted.texts[name][generator.randrange(len(crafted.texts[name]))] = generator.choice(VALUES)
    elif what == 4:
        codes = crafted.texts["codes"][0]
        codes[generator.randrange(3)] = generator.choice([*VALUES, ["x"] * 9, codes[0][1:]])
    else:
        lengths = np.array([generator.choice([0, 1, 2, 2**32 - 1]) for _ in range(generator.randrange(5))], dtype="<u4")
        raw = lengths.tobytes() + generator.randbytes(generator.randrange(4))
        crafted.set_keys(shard, generator.choice([zlib.compress(raw), raw, b"", zlib.compress(bytes(2**22))]))


@pytest.mark.parametrize("at_once", [index_file.CHECKED_AT_ONCE, 0])
def test_a_catalogue_that_lies_is_named_or_built_again(shards, monkeypatch, at_once):
    monkeypatch.setattr(index_file, "CHECKED_AT_ONCE", at_once)
    path, right = catalogue_path(shards[0]), told(shards)
    raw, outcomes = path.read_bytes(), {"named": 0, "built again": 0, "believed": 0}
    path.write_bytes(Crafted(raw).sealed())
    assert told(shards) == right and path.read_bytes() == raw, "what is crafted here without a change is as it was"
    for seed in range(120):
        crafted, generator = Crafted(raw), random.Random(seed)
        change(crafted, generator)
        path.write_bytes(crafted.sealed())
        try:
            found = told(shards)
            outcomes["built again" if found == right else "believed"] += 1
        except DataError as error:
            assert str(path) in str(error) and "built anew" in str(error), (seed, error)
            outcomes["named"] += 1
    assert min(outcomes.values()) > 2, outcomes


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("first_member", 2**62, "samples whose members are not in it"),
        ("record", 9, "samples without their record"),
        ("record", -1, "samples without their record"),
        ("reason", 7, "samples that are bad for an unknown reason"),
        ("offset", 2**62, "members that are not in the shard"),
        ("size", -1, "members that are not in the shard"),
        ("first", -1, "members with negative extents"),
        ("code", 99, "members of an unknown kind"),
    ],
)
def test_a_field_that_cannot_be_is_an_error_of_its_own(shards, name, value, said):
    path = catalogue_path(shards[0])
    told(shards)
    crafted = Crafted(path.read_bytes())
    crafted.set_rows(1, 0, name, value)
    path.write_bytes(crafted.sealed())
    catalogue = open_catalogue(shards)
    assert len(catalogue.index(0)) == 3
    for ask in (lambda: catalogue.index(1), lambda: catalogue.rows(np.array([1]), np.array([0]))):
        with pytest.raises(DataError, match=rf"shards.mimo-catalogue: the index is damaged where .*s1.tar \({said}"):
            ask()
    assert not path.exists() and told(shards)


def test_keys_that_unpack_to_more_than_the_shard_has_are_not_unpacked(shards):
    path = catalogue_path(shards[0])
    told(shards)
    crafted = Crafted(path.read_bytes())
    crafted.set_keys(2, zlib.compress(bytes(2**28)))
    crafted.parts += bytes(-len(crafted.parts) % 64)
    path.write_bytes(crafted.sealed())
    index = open_catalogue(shards).index(2)
    with pytest.raises(DataError, match=r"shards.mimo-catalogue: .* keys of .*s2.tar \(of another length\): remove it"):
        index.key(0)
