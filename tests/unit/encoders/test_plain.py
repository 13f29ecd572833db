"""A plain torch module as an encoder: its features, and what of it is refused."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from encoders.errors import EncoderError
from encoders.plain.model import plain_encoder
from encoders.plain.spec import AudioSpec
from tests.dist.own_encoder import Conv, ConvSpec


def built(module, spec, merge: int = 1, dtype: torch.dtype = torch.float32):
    config = SimpleNamespace(init_seed=7, recompute_granularity=None, params_dtype=dtype)
    return plain_encoder(module)(config, spec, None, None, merge, None)


@dataclass
class AnySize(ConvSpec):
    """Images of their own size."""

    def input_size(self, height, width, merge=1):
        return height, width


@dataclass
class Frames(AudioSpec):
    """Frames of four samples."""

    hidden_size: int = 3
    builder = "nowhere:AsFrames"

    def tokens(self, samples):
        return samples // 4

    def shortest(self, tokens):
        return 4 * tokens

    def num_parameters(self):
        return 0


class AsFrames(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()

    def forward(self, waves):
        return waves.unflatten(1, (-1, 4))[..., :3]


def test_images_of_several_sizes_keep_their_order_and_are_joined():
    encoder, spec = built(Conv, AnySize(stride=16), merge=2), AnySize(stride=16)
    torch.manual_seed(1)
    sizes = [(32, 32), (64, 32), (32, 32)]
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    rows = encoder(pixels=images).split([spec.num_tokens(*size, merge=2) for size in sizes])
    for image, own in zip(images, rows, strict=True):
        alone = encoder.model((image[None] / 255 - 0.5) / 0.5)[0]  # row by row, two columns
        first = torch.cat([alone[0], alone[1], alone[2], alone[3]])
        assert torch.allclose(own[0], first, atol=1e-6)


def test_clips_are_joined_and_padded_to_whole_tokens():
    spec = Frames(sample_rate=8, max_seconds=10)
    assert spec.input_size(21, 8, merge=2) == (24, 8) and spec.num_tokens(21, 8, merge=2) == 3
    assert spec.input_size(27, 8, merge=2) == (27, 8), "a clip with whole tokens keeps its length"
    rows = built(AsFrames, spec, merge=2)(waveforms=torch.arange(24.0)[None])
    assert rows.shape == (3, 6) and rows[1].tolist() == [8, 9, 10, 12, 13, 14]
    with pytest.raises(EncoderError, match=r"encoder\.max_seconds 10"):
        spec.input_size(81, 8)


def test_weights_are_those_of_the_seed_and_of_the_type():
    torch.manual_seed(2)
    one = built(Conv, ConvSpec(), dtype=torch.bfloat16)
    torch.manual_seed(3)
    other = built(Conv, ConvSpec(), dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    features = one(pixels=torch.zeros(1, 3, 48, 48, dtype=torch.uint8))
    assert features.dtype is torch.bfloat16 and one.pixel_mean.dtype is torch.float32


class InFloat32(Conv):
    """Computes its first layer in fp32."""

    wants_float32 = True

    def forward(self, pixels):
        assert pixels.dtype is torch.float32
        return super().forward(pixels.to(torch.bfloat16))


def test_a_module_may_get_its_inputs_in_fp32():
    pixels = torch.zeros(1, 3, 48, 48, dtype=torch.uint8)
    asked, not_asked = (built(kind, ConvSpec(), dtype=torch.bfloat16) for kind in (InFloat32, Conv))
    assert asked(pixels=pixels).equal(not_asked(pixels=pixels))


class WithBatchNorm(Conv):
    def __init__(self, spec):
        super().__init__(spec)
        self.norm = torch.nn.BatchNorm2d(3)


class WithDropout(Conv):
    def __init__(self, spec):
        super().__init__(spec)
        self.drop = torch.nn.Dropout(0.3)


class WithoutLast(Conv):
    def forward(self, pixels):
        return super().forward(pixels)[:, :-1]


def test_what_would_go_wrong_unseen_is_refused():
    with pytest.raises(EncoderError, match="1 batch norms, for example norm"):
        built(WithBatchNorm, ConvSpec())
    with pytest.raises(EncoderError, match=r"encoder\.dropout is 0, and WithDropout has dropout of 0\.3"):
        built(WithDropout, ConvSpec())
    built(WithDropout, ConvSpec(dropout=0.3))
    with pytest.raises(EncoderError, match=r"WithoutLast gives \(2, 8, 32\) .* its spec says \(2, 9, 32\)"):
        built(WithoutLast, ConvSpec())(pixels=torch.zeros(2, 3, 48, 48, dtype=torch.uint8))
    with pytest.warns(UserWarning, match="num_parameters"):
        built(AsFrames, Miscounted())


@dataclass
class Miscounted(Frames):
    """Of a module without weights."""

    def num_parameters(self):
        return 5


def test_faults_of_a_spec_name_their_field():
    assert [field for field, _ in ConvSpec(hidden_size=0).faults()] == ["hidden_size"]
    assert [field for field, _ in ConvSpec(pixel_std=[1.0, 0.0, 1.0]).faults()] == ["pixel_std"]
    assert [field for field, _ in ConvSpec(image_size=8).faults()] == ["image_size"]
    assert [field for field, _ in ConvSpec().joint_faults(2)] == ["projector.merge"]
    assert not ConvSpec().faults() and not ConvSpec().joint_faults(3)
    assert [field for field, _ in Frames(sample_rate=0).faults()] == ["sample_rate"]
