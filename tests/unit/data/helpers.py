"""Makers of small images, records and shards."""

import io
import json

import numpy as np
from PIL import Image

from data.index.catalogue import open_catalogue
from data.samples.media_spec import Media
from data.storage.url import place_of


def encode_image(height, width, kind="JPEG", value=None, seed=0, orientation=None):
    if value is None:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    else:
        pixels = np.full((height, width, 3), value, dtype=np.uint8)
    options = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def chat(question, answer):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return json.dumps({"conversations": turns}).encode()


def images(side=16, tokens=4, module="images", placeholder="<image>"):
    return Media(module, "image", placeholder, lambda height, width: tokens, lambda height, width: (side, side))


def prompt_and_truth(data, number):
    """The text of the last learned turn, and of the question before it."""
    turns = data.preference(data.meta(number)).answers[0].turns
    last = max(at for at, turn in enumerate(turns) if turn.is_learned)
    asked = [turn.marked_text for turn in turns[:last] if turn.role == "user"]
    return asked[-1] if asked else "", turns[last].text.strip()


def text_of(data, number):
    """The tokens of a sample; a bad one is counted, as by the loader."""
    sample, bad = data.read_text(number)
    if bad is not None:
        data.bad_samples.record(bad)
    return sample


def media_of(data, number, module):
    """The inputs of a module; a bad sample is counted, as by the loader."""
    items, bad = data.read_media(number, module)
    if bad is not None:
        data.bad_samples.record(bad)
    return items


def open_index(shard, *arguments, **options):
    """The index of one shard. See `open_catalogue`."""
    return open_catalogue([place_of(shard)], *arguments, **options).index(0)
