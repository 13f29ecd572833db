"""Lengths, tokens and spectrograms of clips."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoders.base import num_tokens
from encoders.errors import EncoderError
from encoders.native.whisper.model import WhisperEncoder, log_mel_spectrogram, mel_filters, sinusoids
from encoders.native.whisper.spec import WhisperSpec
from encoders.projectors.spec import ProjectorSpec

SPEC = WhisperSpec(sample_rate=16000, max_seconds=4, hidden_size=6, num_mels=20, num_attention_heads=2)
"""Frames of 320 samples."""


def test_thirty_seconds_are_1500_frames():
    assert WhisperSpec().most_inner_tokens() == WhisperSpec().inner_tokens(480000, 16000) == 1500


@pytest.mark.parametrize(
    ("samples", "rate", "merge", "given_to_encoder"),
    [
        (320, 16000, 1, 320),
        (321, 16000, 1, 640),
        (1, 16000, 4, 1280),  # a token at least
        (8000, 8000, 1, 16000),  # a second
        (44100, 44100, 4, 16640),
    ],
)
def test_clips_are_whole_tokens_of_the_encoder_s_rate(samples, rate, merge, given_to_encoder):
    projector = ProjectorSpec(merge=merge)
    assert SPEC.input_size(samples, rate, merge=projector.merge) == (given_to_encoder, 16000)
    assert SPEC.inner_tokens(samples, rate, merge=projector.merge) == given_to_encoder // 320
    assert num_tokens(SPEC, projector, samples, rate) == given_to_encoder // 320 // merge


@given(samples=st.integers(1, 64000), merge=st.integers(1, 5))
def test_no_clip_has_more_tokens_than_the_longest(samples, merge):
    tokens = SPEC.num_tokens(samples, 16000, merge)
    assert 1 <= tokens <= SPEC.most_tokens(merge)
    assert SPEC.inner_tokens(samples, 16000, merge) == tokens * merge <= SPEC.most_inner_tokens(merge)
    assert SPEC.inner_tokens(samples, 16000, merge) % SPEC.token_unit(merge) == 0


def test_longer_clips_are_refused():
    with pytest.raises(EncoderError, match=r"4\.50 seconds .*max_seconds 4"):
        SPEC.num_tokens(36000, 8000)
    with pytest.raises(EncoderError, match=r"4\.00 seconds \(32001 samples at 8000 Hz\) are more than"):
        SPEC.num_tokens(32001, 8000)


@pytest.mark.parametrize(
    ("changes", "field", "numbers"),
    [
        ({"window": 640}, "window", ["640", "hop 160"]),
        ({"num_mels": 201}, "num_mels", ["201", "window 400"]),
        ({"hidden_size": 7, "num_attention_heads": 7}, "hidden_size", ["even", "7"]),
        ({"num_attention_heads": 4}, "num_attention_heads", ["4", "hidden_size 6"]),
        ({"activation": "tanh"}, "activation", ["'tanh'"]),
    ],
)
def test_impossible_sizes_are_named(changes, field, numbers):
    assert not SPEC.faults()
    found = replace(SPEC, **changes).faults()
    assert [text for name, text in found if name == field and all(number in text for number in numbers)], found


def test_the_spectrogram_is_that_of_its_formula():
    """By numpy, window for window."""
    rng = np.random.default_rng(0)
    wave = rng.normal(size=3200) * np.linspace(0, 1, 3200) ** 4
    filters = mel_filters(SPEC)
    mirrored = np.pad(wave, 200, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([mirrored[at : at + 400] * hann for at in range(0, 3200, 160)], axis=1)
    power = np.abs(np.fft.rfft(frames, axis=0)) ** 2
    expected = np.log10(np.maximum(filters.numpy().T @ power, 1e-10))
    expected = (np.maximum(expected, expected.max() - 8) + 4) / 4
    found = log_mel_spectrogram(torch.tensor(wave, dtype=torch.float32)[None], torch.hann_window(400), filters, 160)
    assert found.shape == (1, 20, 20)
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-3, atol=1e-3)


def test_a_louder_clip_does_not_change_its_neighbour():
    waves, window, filters = torch.randn(2, 1600), torch.hann_window(400), mel_filters(SPEC)
    quiet = log_mel_spectrogram(waves, window, filters, 160)[0]
    louder = torch.stack([waves[0], 1e6 * waves[1]])
    torch.testing.assert_close(log_mel_spectrogram(louder, window, filters, 160)[0], quiet)


def test_a_tone_is_in_its_band_and_silence_is_finite():
    time = torch.arange(3200) / 16000
    filters = mel_filters(SPEC)
    waves = torch.stack([torch.sin(2 * math.pi * 1000 * time), torch.zeros(3200)])
    mels = log_mel_spectrogram(waves, torch.hann_window(400), filters, 160)
    assert mels[0].mean(dim=1).argmax() == filters[1000 // 40].argmax()
    assert torch.equal(mels[1], torch.full_like(mels[1], -1.5))


def test_positions_are_sines_and_cosines():
    positions = sinusoids(50, 6, torch.device("cpu"))
    assert positions.shape == (50, 6)
    torch.testing.assert_close(positions[:, 0], torch.arange(50.0).sin())
    torch.testing.assert_close(positions[:, 5], (torch.arange(50.0) / 10000).cos())


class Doubled(torch.nn.Module):
    """Stands for the layers: every frame twice, plus the first of its clip, so that mixing clips would show."""

    def forward(self, hidden_SBH, attention_mask=None, packed_seq_params=None):
        if packed_seq_params is None:
            return 2 * hidden_SBH + hidden_SBH[:1]
        return torch.cat([2 * part + part[:1] for part in hidden_SBH.split(packed_seq_params)])


class Stage(WhisperEncoder):
    """A stage without Megatron-Core's layers."""

    def __init__(self, first: bool, last: bool):
        torch.nn.Module.__init__(self)
        self.spec, self.merge = SPEC, 2
        self.config = SimpleNamespace(
            init_seed=1,
            params_dtype=torch.float32,
            sequence_parallel=False,
            perform_initialization=True,
            documents=lambda tokens: tokens,
        )
        self.is_first_stage, self.is_last_stage = first, last
        self.layers = Doubled()
        if first:
            self._build_embeddings()


def test_clips_keep_their_order_and_do_not_mix():
    torch.manual_seed(0)
    lengths = [1280, 640, 3200, 640]
    clips = [torch.randn(length) for length in lengths]
    whole, first, last = Stage(True, True), Stage(True, False), Stage(False, True)
    alone = torch.cat([whole(waveforms=[clip]) for clip in clips])
    assert alone.shape == (sum(length // 640 for length in lengths), 12)
    torch.testing.assert_close(whole(waveforms=clips), alone)
    between = first(waveforms=clips)
    assert between.shape == (sum(length // 320 for length in lengths), 6)
    sizes = [(length, 16000) for length in lengths]
    one_by_one = [
        last(sizes=[size], hidden_states=first(waveforms=[clip])) for size, clip in zip(sizes, clips, strict=True)
    ]
    torch.testing.assert_close(last(sizes=sizes, hidden_states=between), torch.cat(one_by_one))


def test_parameters_in_front_of_the_layers_are_counted():
    none = replace(SPEC, num_layers=0).num_parameters() - 12  # without the final norm
    assert none == sum(parameter.numel() for parameter in Stage(True, True).parameters())
