"""Features on disk: what is kept, what goes, and what a damaged file does."""

import os
import warnings

import pytest
import torch

from mimo_train.training.step import feature_cache
from mimo_train.training.step.feature_cache import SUFFIX, FeatureCache

MEGABYTE = 10**6


def opened(folder, *, size: int = MEGABYTE, fingerprint: str = "weights", writers: int = 1) -> FeatureCache:
    return FeatureCache(folder, size, fingerprint=fingerprint, writers=writers)


def files(folder) -> list:
    return sorted(folder.glob(f"??/*{SUFFIX}"))


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in files(folder))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_file_is_removed_and_can_be_written_again(tmp_path, damage):
    cache = opened(tmp_path)
    cache.write("a", torch.ones(4, 4))
    (path,) = files(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes({"flipped": bytes(raw), "cut": bytes(raw[:-9]), "empty": b""}[damage])
    assert cache.read("a") is None and cache.files.damaged == 1 and not files(tmp_path)
    cache.write("a", torch.ones(4, 4))
    assert torch.equal(cache.read("a"), torch.ones(4, 4))


def test_the_bound_holds_and_what_was_used_last_stays(tmp_path):
    bound, entry = 100_000, torch.zeros(25, 40)  # 4000 bytes each
    cache = opened(tmp_path, size=bound)
    for number in range(60):
        cache.write(str(number), entry)
        (path,) = [path for path in files(tmp_path) if path == cache.files._path(cache._key(str(number)))]
        os.utime(path, ns=(number * 10**9,) * 2)  # times of files are too coarse for a quick test
        if number >= 3:
            assert cache.read("3") is not None, number
        assert size_of(tmp_path) <= bound
    assert cache.read("59") is not None and cache.read("5") is None
    assert 0.7 * bound < size_of(tmp_path)


def test_several_writers_keep_the_bound_together(tmp_path):
    bound, entry = 100_000, torch.zeros(25, 20)
    caches = [opened(tmp_path, size=bound, writers=4) for _ in range(4)]
    for number in range(100):
        caches[number % 4].write(str(number), entry)
        assert size_of(tmp_path) <= bound


def test_what_other_runs_left_counts(tmp_path):
    full = opened(tmp_path, size=200_000, fingerprint="others")
    for number in range(40):
        full.write(str(number), torch.zeros(25, 40))
    opened(tmp_path, size=100_000)
    assert size_of(tmp_path) <= 80_000


def test_what_is_larger_than_the_room_is_not_kept(tmp_path):
    cache = opened(tmp_path, size=10_000)
    cache.write("a", torch.zeros(100, 100))
    assert not files(tmp_path) and cache.read("a") is None


def test_a_disk_that_refuses_ends_the_writing_and_not_the_run(tmp_path, monkeypatch):
    cache = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(feature_cache.Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.warns(UserWarning, match="no more features are kept in this run.*No space"):
            cache.write("a", torch.ones(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("b", torch.ones(2, 2))
    assert not files(tmp_path)


def test_features_of_other_code_are_not_used(tmp_path, monkeypatch):
    from mimo_train.training.step.feature_cache import _code

    source = tmp_path / "written_by_a_user.py"
    source.write_text("import torch\nclass Own(torch.nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from written_by_a_user import Own

    module = torch.nn.Sequential(Own(), torch.nn.Linear(1, 1))
    before = _code(module)
    assert _code(torch.nn.Sequential(Own(), torch.nn.Linear(2, 2))) == before
    source.write_text(source.read_text() + "# changed\n")
    assert _code(module) != before


def test_a_number_without_axes_is_part_of_the_fingerprint():
    from mimo_train.training.step.feature_cache import _weights

    module = torch.nn.BatchNorm1d(2)
    assert module.num_batches_tracked.dim() == 0
    before = _weights(module)
    assert _weights(torch.nn.BatchNorm1d(2)) == before
    module.num_batches_tracked += 1
    assert _weights(module) != before
