"""Datasets of the Hugging Face hub as shards: which files, which commit, and what is wrong."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from data.errors import DataError
from data.index.find_shards import find_shards
from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from tests.tables import write_table

PETS = "hf://datasets/org/pets"


@pytest.fixture
def pets(hub, tmp_path):
    """A dataset of three samples to train on and one to test, and its commit."""
    for name, texts in (("train-00000-of-00002", "ab"), ("train-00001-of-00002", "c"), ("test-00000-of-00001", "d")):
        write_table(tmp_path / "pets" / "data" / f"{name}.parquet", {"text": [*texts]})
    (tmp_path / "pets" / "README.md").write_text("# Pets")
    return hub.commit("org/pets", tmp_path / "pets")


def names(pattern):
    return [path.name for path in find_shards(pattern)]


def test_a_name_is_the_train_split_in_the_cache(hub, pets):
    paths = find_shards(PETS)
    folder = Path(constants.HF_HUB_CACHE) / "datasets--org--pets" / "snapshots" / pets
    assert paths == [folder / "data" / f"train-0000{at}-of-00002.parquet" for at in range(2)]
    assert hub.sent.keys() == {"README.md", *(f"data/{path.name}" for path in paths)}
    data = ShardDataset(PETS, tokenizer=build_tokenizer("bytes", []), sequence_length=8, shuffle=False)
    assert [chr(data.read_text(number)[0].input_ids[1]) for number in range(3)] == [*"abc"]
    hub.forget()
    assert names(f"{PETS}/data/test-*.parquet") == ["test-00000-of-00001.parquet"]
    assert [*hub.sent] == ["data/test-00000-of-00001.parquet"]
    assert find_shards(f"{PETS}/data") == find_shards(f"{PETS}/**/train-*.parquet") == paths
    hub.forget()
    assert find_shards(f"{PETS}@{pets}") == paths and hub.requests == []


def test_a_branch_that_moves_is_followed_and_a_commit_is_not(hub, pets, tmp_path, monkeypatch):
    write_table(tmp_path / "pets" / "data" / "train-00000-of-00002.parquet", {"text": ["other"]})
    before, moved = find_shards(PETS), hub.commit("org/pets", tmp_path / "pets")
    assert find_shards(f"{PETS}@{pets}") == before
    after = find_shards(PETS)
    assert [path.parents[1].name for path in after] == [moved] * 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_shards(PETS) == after
    with pytest.raises(DataError, match=r"org/pets is not complete in the cache .* HF_HUB_OFFLINE is set"):
        find_shards(f"{PETS}/data/test-*.parquet")


def test_ranks_of_a_machine_download_once(hub, pets):
    with ThreadPoolExecutor(4) as ranks:
        paths = [*ranks.map(find_shards, [PETS] * 4)]
    assert paths == [paths[0]] * 4
    assert sum(request.startswith("GET /datasets/") for request in hub.requests) == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://datasets/org/none", r"data.shards: .*/datasets/org/none does not exist, or is private"),
        (f"{PETS}@v2", "has no revision v2"),
        (f"{PETS}/no", f"{PETS}/no has no such parquet file or tar. .* {PETS}@~parquet"),
        ("hf://spaces/org/pets", "is no dataset of the hub: give hf://datasets/ORG/NAME"),
        ("hf://datasets/pets", "is no dataset of the hub"),
        ("hf://datasets/org/langs", "has parquet files of de/train, en/train: name those to read, such as"),
    ],
)
def test_a_wrong_name_is_explained(url, words, hub, pets):
    hub.commit("org/langs", {"de/train-0.parquet": b"", "en/train-0.parquet": b""})
    hub.commit("org/langs", {"default/train/0.parquet": b"1", "default/test/0.parquet": b"2"}, "refs/convert/parquet")
    with pytest.raises(DataError, match=words):
        find_shards(url)
    assert names("hf://datasets/org/langs/en") == ["train-0.parquet"]
    assert [path.read_bytes() for path in find_shards("hf://datasets/org/langs@~parquet")] == [b"1"]


def test_gates_and_dead_networks_are_explained(hub, pets, monkeypatch):
    hub.repositories["org/pets"].gated = True
    with pytest.raises(DataError, match=r"org/pets is gated. Accept its terms there, and log in"):
        find_shards(PETS)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be downloaded .*Check the network and HF_ENDPOINT"):
        find_shards(PETS)
