"""Sizes, tokens and positions of images that keep their aspect ratio."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoders.base import joint_faults, num_tokens
from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.vit.patches import gather_patches, token_by_token
from encoders.native.vit.positions import position_taps
from encoders.projectors.spec import ProjectorSpec

NATIVE = VisionSpec(resize="native", image_size=64, patch_size=8, min_pixels=1024, max_pixels=16384, class_token=True)

SIDES = st.integers(1, 3000)


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((64, 64), (64, 64)),
        ((60, 100), (64, 96)),  # the nearest multiples of 16
        ((16, 16), (32, 32)),  # enlarged to 1024 pixels
        ((20, 5), (64, 16)),  # 64 x 16: twice a side and a bit
        ((640, 640), (128, 128)),  # reduced to 16384
        ((1000, 250), (256, 64)),
        ((4, 3000), (16, 1024)),  # one side is 16 at least: the other loses
    ],
)
def test_sides_are_multiples_within_the_bounds(size, resized):
    projector = ProjectorSpec(merge=2)
    assert NATIVE.input_size(*size, merge=projector.merge) == resized
    rows, columns = (side // 8 for side in resized)
    assert NATIVE.grid(*size, merge=2) == (rows, columns)
    assert num_tokens(NATIVE, projector, *size) == rows * columns // 4
    assert NATIVE.inner_tokens(*size, merge=projector.merge) == rows * columns + 1


@given(height=SIDES, width=SIDES, merge=st.sampled_from([1, 2, 3]), largest=st.sampled_from([576, 4096, 16384]))
def test_any_size_has_whole_tokens_and_no_more_than_the_most(height, width, merge, largest):
    spec = replace(NATIVE, min_pixels=min(1024, largest), max_pixels=largest)
    rows, columns = spec.grid(height, width, merge)
    assert rows % merge == columns % merge == 0 < rows * columns <= spec.most_patches(merge)
    if min(height, width) >= merge * spec.patch_size:  # a thinner image is made as thick as a token
        taller = spec.grid(2 * height, width, merge)
        assert taller[0] * columns >= rows * taller[1], "a taller image has a taller grid"


def test_fixed_images_are_as_they_were():
    spec, projector = VisionSpec(image_size=48, patch_size=8), ProjectorSpec(merge=2)
    assert spec.input_size(7, 900, merge=projector.merge) == (48, 48)
    assert num_tokens(spec, projector, 7, 900) == 9 and spec.inner_tokens(7, 900, merge=projector.merge) == 36
    assert spec.most_patches(2) == 36


@pytest.mark.parametrize(
    ("changes", "field", "numbers"),
    [
        ({"resize": "stretch"}, "resize", ["'stretch'"]),
        ({"resize": "fixed"}, "min_pixels", ["1024", "set it to 0"]),
        ({"resize": "fixed"}, "max_pixels", ["16384", "set it to 0"]),
        ({"min_pixels": 20000}, "min_pixels", ["20000", "16384"]),
        ({"min_pixels": 5000, "max_pixels": 0}, "min_pixels", ["5000", "4096", "image_size 64"]),
    ],
)
def test_impossible_bounds_are_named(changes, field, numbers):
    found = replace(NATIVE, **changes).faults()
    assert [text for name, text in found if name == field and all(number in text for number in numbers)], found


def test_a_largest_image_has_room_for_one_token():
    ((field, text),) = joint_faults(replace(NATIVE, max_pixels=1200), ProjectorSpec(merge=5))
    assert field == "encoder.max_pixels" and "1200" in text and "1600" in text
    assert not joint_faults(NATIVE, ProjectorSpec(merge=5)), "the grid of positions need not be whole tokens"


def resized(positions: torch.Tensor, rows: int, columns: int, **options) -> torch.Tensor:
    """[rows, columns, H] of a learned grid [R, C, H]."""
    taps = position_taps(rows, columns, tuple(positions.shape[:2]), **options)
    values = positions.flatten(0, 1)[taps.places] * taps.weights.to(positions)[..., None]
    return values.sum(1).unflatten(0, (rows, columns))


def test_positions_keep_their_place():
    """On a plane that rises by 1 a column and by 10 a row, values are places."""
    plane = (torch.arange(6.0)[:, None] * 10 + torch.arange(5.0)).unsqueeze(-1)
    assert torch.equal(resized(plane, 6, 5), plane)
    middle_row = resized(plane, 3, 5)[1, :, 0]
    torch.testing.assert_close(middle_row, 25 + torch.arange(5.0))


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize("corners", [False, True])
def test_a_much_coarser_grid_loses_no_position(method, corners):
    """Between corners places are further apart than by the numbers of them, and more values count at each."""
    ones = torch.ones(27, 24, 1)
    torch.testing.assert_close(
        resized(ones, 5, 3, method=method, antialias=True, corners=corners), torch.ones(5, 3, 1), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("grid", [(9, 5), (4, 5), (2, 7), (1, 30), (3, 2), (4, 7)])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
def test_positions_are_those_of_interpolation(grid, method, antialias, corners):
    """Whatever is left out has no weight."""
    positions = torch.randn(4, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(
        positions.permute(2, 0, 1)[None], size=grid, mode=method, align_corners=corners, antialias=antialias
    )
    found = resized(positions, *grid, method=method, antialias=antialias, corners=corners)
    torch.testing.assert_close(found, expected[0].permute(1, 2, 0), rtol=0, atol=1e-6)


def test_patches_of_images_of_several_sizes_by_their_order():
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in ((8, 12), (8, 12), (9, 4))]
    grids = {(2, 3): 2, (2, 1): 1}  # of patches of 4 x 4; a line of the last image is left over
    orders = {(2, 3): torch.tensor([5, 0, 3, 1, 4, 2]), (2, 1): torch.tensor([1, 0])}
    found = gather_patches(images, grids, orders, 4).split([6, 6, 2])
    for image, (rows, columns), patches in zip(images, ((2, 3), (2, 3), (2, 1)), found, strict=True):
        expected = image[:, : rows * 4].unflatten(1, (rows, 4)).unflatten(3, (columns, 4)).permute(1, 3, 0, 2, 4)
        assert torch.equal(patches, expected.flatten(0, 1)[orders[rows, columns]])
    alike = torch.stack(images[:2])
    assert torch.equal(gather_patches(alike, {(2, 3): 2}, orders, 4), torch.cat(found[:2]))


def test_patches_stand_token_by_token():
    assert token_by_token(4, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert token_by_token(2, 3, 1).tolist() == list(range(6))


class Doubled(torch.nn.Module):
    """Stands for the layers: every token twice, plus the first of its image, so that mixing images would show."""

    def forward(self, hidden_SBH, attention_mask=None, packed_seq_params=None):
        if packed_seq_params is None:
            return 2 * hidden_SBH + hidden_SBH[:1]
        return torch.cat([2 * part + part[:1] for part in hidden_SBH.split(packed_seq_params)])


def test_images_keep_their_order_and_do_not_mix():
    from encoders.native.vit.model import VisionTransformer

    class Stage(VisionTransformer):
        def __init__(self, first: bool, last: bool):
            torch.nn.Module.__init__(self)
            self.spec, self.merge = replace(NATIVE, hidden_size=6), 2
            self.config = SimpleNamespace(
                init_seed=1,
                params_dtype=torch.float32,
                init_method_std=0.02,
                sequence_parallel=False,
                perform_initialization=True,
                documents=lambda tokens: tokens,
            )
            self.is_first_stage, self.is_last_stage = first, last
            self.layers = Doubled()
            if first:
                self._build_embeddings()

    torch.manual_seed(0)
    shapes = [(16, 32), (64, 64), (16, 32), (32, 16)]
    images = [torch.randint(0, 256, (3, *shape), dtype=torch.uint8) for shape in shapes]
    whole, first, last = Stage(True, True), Stage(True, False), Stage(False, True)
    alone = torch.cat([whole(pixels=[image]) for image in images])
    assert alone.shape == (sum(height * width // 256 for height, width in shapes), 24)
    torch.testing.assert_close(whole(pixels=images), alone)
    between = first(pixels=images)
    assert between.shape == (sum(height * width // 64 + 1 for height, width in shapes), 6)
    one_by_one = [
        last(sizes=[shape], hidden_states=first(pixels=[each])) for shape, each in zip(shapes, images, strict=True)
    ]
    torch.testing.assert_close(last(sizes=shapes, hidden_states=between), torch.cat(one_by_one))
    same = torch.stack([images[0], images[2]])
    torch.testing.assert_close(first(pixels=same), torch.cat([first(pixels=[images[0]]), first(pixels=[images[2]])]))
