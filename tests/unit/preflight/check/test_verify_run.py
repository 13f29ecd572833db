"""`shards verify CONFIG`: every sample as the run would read it."""

from pathlib import Path

from mimo_train.cli import main
from tests.unit.preflight.check.shards import image, on, record, shard, sound


def verify(capsys, *arguments):
    code = main(["shards", "verify", *arguments])
    out = capsys.readouterr()
    return code, out.out.splitlines(), out.err


def test_what_a_run_would_refuse_is_bad_though_every_file_is_whole(capsys):
    members = [*sound(70), ("0100.png", image(60, 60)), ("0100.json", record("<image>\nWhat?"))]
    members += [("0101.png", image()), ("0101.txt", b"A square."), ("0101.npy", b"x")]
    path = shard(Path("a.tar"), *members)
    assert main(["shards", "verify", "a.tar"]) == 0
    capsys.readouterr()
    bounds = {"data.bounds.pixels": "2500", "data.validation_shards": "a.tar"}
    code, lines, err = verify(capsys, *on(path, **bounds), "--workers", "2")
    assert code == 1
    bad = "bad: a.tar: key 0100: member .png: 60 x 60 = 3600 pixels"
    assert sum(line.startswith(bad) for line in lines) == 2  # of both sets
    assert "data.shards: 72 samples, 1 bad, data.max_bad_samples allows 0" in lines
    assert any(line.startswith("  1 x member .png: # x # = # pixels") for line in lines)
    assert "data.shards: members .npy (1) are not read" in err
    allowed = on(path, **bounds, **{"data.max_bad_samples": "0.02"})
    code, lines, _ = verify(capsys, *allowed, "--workers", "1")
    assert code == 0 and "data.shards: 72 samples, 1 bad, data.max_bad_samples allows 1" in lines


def test_a_reason_with_numbers_of_other_lengths_is_counted_as_one(capsys):
    members = [("0100.png", image(60, 60)), ("0100.txt", b"a"), ("0101.png", image(600, 600)), ("0101.txt", b"b")]
    path = shard(Path("a.tar"), *sound(3), *members)
    _, lines, _ = verify(capsys, *on(path, **{"data.bounds.pixels": "2500"}), "--workers", "1")
    assert sum(line.startswith("  2 x member .png: # x # = # pixels") for line in lines) == 1


def test_every_sample_of_every_source_is_read_and_the_bad_ones_of_all_count(capsys):
    large, small = sound(5), [("0100.txt", b"A circle."), ("0101.txt", b"A square."), ("0101.png", b"no image")]
    shard(Path("large.tar"), *large)
    shard(Path("small.tar"), *small)
    mix = "[{shards: large.tar, weight: 1, name: large}, {shards: small.tar, weight: 9, name: small}]"
    mixed = [*on(""), f"data.mix={mix}", "data.validation_fraction=0.3"]
    code, lines, err = verify(capsys, *mixed, "data.max_bad_samples=0.15", "--workers", "1")
    assert code == 0, err  # one of seven
    assert "data.mix[0].shards: 5 samples, 0 bad, data.max_bad_samples allows 0" in lines
    assert "data.mix[1].shards: 2 samples, 1 bad, data.max_bad_samples allows 0" in lines
    assert verify(capsys, *mixed, "data.max_bad_samples=0.1", "--workers", "1")[0] == 1


def test_faults_of_the_config_and_of_the_shards_are_named(capsys):
    shard(Path("a.tar"), *sound(1))
    assert verify(capsys, "a.tar", "train.iters=3")[0] == 1
    code, _, err = verify(capsys, *on("a.tar", **{"data.background": "pink"}), "--workers", "1")
    assert code == 1 and "data.background: must be white, black, grey, none or #RRGGBB, is 'pink'" in err
    Path("b.tar").write_bytes(b"x" * 700)
    code, lines, err = verify(capsys, *on("b.tar"), "--workers", "1")
    assert code == 1 and "b.tar" in "".join(lines) + err
