"""Small videos, made by PyAV."""

import io
from fractions import Fraction

import numpy as np

STEP = 8
"""By how much each image is brighter than the one before."""


def make_video(kind="mp4", codec="mpeg4", images=30, rate=10, height=48, width=64, key_every=12, seed=None) -> bytes:
    """Image n is grey of `STEP` n; with a seed, noise."""
    import av

    raw = io.BytesIO()
    noise = np.random.default_rng(seed)
    with av.open(raw, "w", format="matroska" if kind == "mkv" else kind) as file:
        stream = file.add_stream(codec, rate=rate, options={"qscale": "2", "flags": "+qscale"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", key_every
        for at in range(images):
            pixels = np.full((height, width, 3), STEP * at % 256, dtype=np.uint8)
            if seed is not None:
                pixels = noise.integers(0, 256, pixels.shape, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = at, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return raw.getvalue()
