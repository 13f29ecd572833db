"""Images a core reads, decodes and resizes in a second: our path and those of others, from the same shards.

    python -m benchmarks.data_read [--samples 1000] [--rounds 5]    # makes shards of images in a temporary folder

All give batches of 64, uint8 [64, 3, 224, 224], resized with antialiasing from photos of about 500 x 375 (page cache,
one process, one thread, torch with one thread): ours by `StepLoader`, in a shuffled order, with the plan of every step;
webdataset with Pillow; webdataset with torchvision's decoder and its resize; megatron-energon 7.4, whose decoder gives
uint8, with torchvision's resize; webdataset with torchvision's decoder and the fast image processor of `transformers`
(without its normalisation: ours is on the device). Each round runs all, in another order. Processor seconds of the
process.

The bytes that a language rank reads of the same samples stand beside those of an encoder's rank, and the plan of a step
beside both (`plan_step.py`). megatron-energon is no dependency: where it is not installed, it is left out.
"""

import argparse
import importlib.util
import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from benchmarks.plan_step import compare
from data.loader import StepLoader
from data.media.options import Resize
from data.order.step import Batching, Reader
from data.samples.media_spec import Media
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import TextLengths
from data.text.tokens import build_tokenizer
from tests.tars import write_tar
from tests.unit.data.helpers import chat

SIDE, STEP, OF_SHARD, KINDS = 224, 64, 250, 100
"""Pixels of a side; samples of a step, of a shard; different images."""


def main() -> None:
    """Print what every way does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Path], Iterable[torch.Tensor]]] = {
        "ours": ours,
        "webdataset + PIL": lambda folder: stacked(with_pillow(folder)),
        "webdataset + torchvision": lambda folder: stacked(with_torchvision(folder)),
        "transformers' fast processor": lambda folder: stacked(with_transformers(folder)),
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = make_shards(folder, args.samples)
        print(f"{args.samples} images of {size / 1e3:.0f} KB on average")
        if importlib.util.find_spec("megatron.energon") is None:
            print("megatron-energon is not installed, and left out: pip install megatron-energon==7.4.0")
        else:
            prepare_energon(folder)
            ways["megatron-energon"] = with_energon
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(args.rounds + 1):
            for name in random.Random(round_).sample([*ways], len(ways)):
                rate = rate_of(ways[name](folder), args.samples)
                if round_:  # the first imports and opens
                    rates[name].append(rate)
        for name, own in rates.items():
            ratios = [one / other for one, other in zip(rates["ours"], own, strict=True)]
            print(
                f"{name:<30}{statistics.median(own):>7.0f} images/s of a core ({min(own):.0f} to {max(own):.0f}); "
                f"ours is {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        bytes_of_ranks(folder)
        data = dataset(folder)
        list(TextLengths(data).build(processes=1))
        TextLengths(data).serve()
        compare(data, 512)


def make_shards(folder: Path, samples: int) -> float:
    """Shards of photos: noise of several scales, as much of each as photos have. Returns their mean bytes."""
    generator, photos = np.random.default_rng(0), []
    for _ in range(KINDS):
        height, width = (int(side) for side in generator.permutation([375, 500]) + generator.integers(-40, 40, 2))
        image = np.zeros((height, width, 3))
        for scale in (4, 16, 64, 256):
            noise = generator.normal(size=(height // scale + 2, width // scale + 2, 3)).astype(np.float32)
            large = torch.nn.functional.interpolate(
                torch.from_numpy(noise).permute(2, 0, 1)[None], size=(height, width), mode="bicubic"
            )
            image += large[0].permute(1, 2, 0).numpy() * 4 * scale**0.5
        path = folder / "one.jpg"
        Image.fromarray((128 + image).clip(0, 255).astype(np.uint8)).save(path, quality=95)
        photos.append(path.read_bytes())
        path.unlink()
    for first in range(0, samples, OF_SHARD):
        members = []
        for number in range(first, min(first + OF_SHARD, samples)):
            members += [(f"{number:06d}.jpg", photos[number % KINDS]), (f"{number:06d}.json", chat("<image>?", "word"))]
        write_tar(folder / f"s-{first:06d}.tar", members)
    return statistics.mean(map(len, photos))


def rate_of(batches: Iterable[torch.Tensor], samples: int) -> float:
    """Images in a processor second, user and system."""
    before, found = processor(), 0
    for batch in batches:
        assert batch.dtype == torch.uint8 and batch.shape[1:] == (3, SIDE, SIDE), (batch.dtype, batch.shape)
        assert batch.is_contiguous()
        found += len(batch)
        if found >= samples:
            break
    assert found >= samples, found
    return found / (processor() - before)


def stacked(images: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Batches of STEP images, the last one perhaps of fewer."""
    of_batch: list[torch.Tensor] = []
    for image in images:
        of_batch.append(image)
        if len(of_batch) == STEP:
            yield torch.stack(of_batch)
            of_batch = []
    if of_batch:
        yield torch.stack(of_batch)


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def dataset(folder: Path) -> ShardDataset:
    media = Media(
        module="images",
        kind="image",
        placeholder="<image>",
        sequence_tokens=lambda *_: 64,
        size=lambda *_: (SIDE, SIDE),
        resize=Resize("bicubic"),
    )
    tokenizer = build_tokenizer("bytes", ["<image>"])
    return ShardDataset(folder, tokenizer=tokenizer, sequence_length=256, media=[media])


def ours(folder: Path) -> Iterator[torch.Tensor]:
    data = dataset(folder)
    with StepLoader(data, Batching(STEP, STEP), [Reader("images", 0, 1)], workers=0) as steps:
        for step in steps:
            for microbatch in step.microbatches:
                yield microbatch["modality_inputs"]["images"]["images"]["pixels"]
    data.close()


def tars(folder: Path) -> Any:
    return webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)


def with_pillow(folder: Path) -> Iterator[torch.Tensor]:
    for (image,) in tars(folder).decode("pil").to_tuple("jpg"):
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        yield torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous()


def decoded(folder: Path) -> Iterator[torch.Tensor]:
    for (raw,) in tars(folder).to_tuple("jpg"):
        yield decode_image(torch.frombuffer(bytearray(raw), dtype=torch.uint8), mode=ImageReadMode.RGB)


def small(image: torch.Tensor) -> torch.Tensor:
    return transforms.resize(image, [SIDE, SIDE], InterpolationMode.BICUBIC, antialias=True)


def with_torchvision(folder: Path) -> Iterator[torch.Tensor]:
    return map(small, decoded(folder))


def with_transformers(folder: Path) -> Iterator[torch.Tensor]:
    from transformers import SiglipImageProcessor

    process = SiglipImageProcessor(
        size={"height": SIDE, "width": SIDE}, resample=3, do_rescale=False, do_normalize=False
    )
    for image in decoded(folder):
        yield process(image, return_tensors="pt")["pixel_values"][0]


def prepare_energon(folder: Path) -> None:
    """What its `energon prepare` writes."""
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    names = sorted(path.name for path in folder.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(folder, names, split_parts_ratio=[("train", 1.0)], workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CaptioningWebdataset\nfield_map: {image: jpg, caption: json}\n"
    )


def with_energon(folder: Path) -> Iterator[torch.Tensor]:
    from megatron.energon import (
        DefaultTaskEncoder,
        SampleDecoder,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
    )

    class Encoder(DefaultTaskEncoder):
        """Resizes; the step's samples as they are."""

        decoder = SampleDecoder(image_decode="torchrgb8")

        def encode_sample(self, sample: Any) -> Any:
            return small(sample.image)

        def batch(self, samples: list[Any]) -> Any:
            return torch.stack(samples)

    data = get_train_dataset(
        folder,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=STEP,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
    )
    yield from get_savable_loader(data)


def bytes_of_ranks(folder: Path) -> None:
    """What ranks of both kinds read for the same steps."""
    read = {}
    for module in ("language", "images"):
        data = dataset(folder)
        with StepLoader(data, Batching(STEP, STEP), [Reader(module, 0, 1)], workers=0, limit=8) as steps:
            for _ in steps:
                pass
        read[module] = sum(data.reader.bytes_read.values())
        data.close()
    print(
        f"bytes of {8 * STEP} samples: language {read['language']:,}, encoder {read['images']:,}: "
        f"{read['language'] / read['images']:.2%}"
    )


if __name__ == "__main__":
    main()
