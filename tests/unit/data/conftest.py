"""Small shards for the tests of the data path."""

import gzip

import pytest
import torch

from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images
from tests.unit.data.text.chat_templates import save_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small(tmp_path):
    """Two shards, 13 samples: every third has no image, sample 4 has two; image n is filled with the value 10 n."""
    folder = tmp_path / "small"
    folder.mkdir()
    members = []
    for n in range(13):
        count = 0 if n % 3 == 2 else 2 if n == 4 else 1
        part = [(f"{n:04d}.{at}.png", encode_image(20 + n, 16, "PNG", value=10 * n + at)) for at in range(count)]
        members.append([*part, (f"{n:04d}.json", chat("<image>" * count + f"q{n}", f"a{n}"))])
    write_tar(folder / "a-000000.tar", [entry for part in members[:6] for entry in part])
    write_tar(folder / "a-000001.tar", [entry for part in members[6:] for entry in part])
    return folder


@pytest.fixture
def dataset(small):
    def make(shards=small, media=None, sequence_length=24, **options):
        media = (images(),) if media is None else media
        tokenizer = build_tokenizer("bytes", [item.placeholder for item in media])
        return ShardDataset(shards, tokenizer=tokenizer, sequence_length=sequence_length, media=media, **options)

    return make


@pytest.fixture
def squeezed(small, tmp_path):
    """`small` as .tar.gz."""
    folder = tmp_path / "squeezed"
    folder.mkdir()
    for path in small.glob("*.tar"):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`make(template, ...)`: a folder with a tokenizer that has the template."""
    made = {}

    def make(template: str, **options):
        key = (template, repr(options))
        if key not in made:
            made[key] = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, **options)
        return made[key]

    return make
