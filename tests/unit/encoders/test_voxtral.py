"""Audio of Voxtral, whose processor leaves tokens to mistral_common."""

import numpy as np
import pytest

from encoders.transformers_media.processor import _voxtral
from tests.dist.all_types.configs import tiny_config
from tests.dist.all_types.processors import tiny_processor


@pytest.mark.parametrize(("samples", "chunks"), [(100, 1), (480000, 1), (480001, 2)])
def test_tokens_are_those_of_mistral_common(samples, chunks):
    """It writes `[25] + [24] * 375 * chunks` (`AudioEncoder.encode_audio` of 1.13.1)."""
    processor = tiny_processor("voxtral", tiny_config("voxtral"))
    inputs, (text,) = _voxtral(processor, [np.zeros(samples)], **processor._merge_kwargs()["audio_kwargs"])
    assert processor.tokenizer(text)["input_ids"] == [25, *[24] * 375 * chunks]
    assert inputs["input_features"].shape == (chunks, 128, 3000)
