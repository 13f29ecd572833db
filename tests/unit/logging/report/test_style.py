"""The style sheet: every pair of colours can be read, in light and in dark, and no class is left over."""

import itertools
import re
from pathlib import Path

import pytest

from mimo_train.logging.report import page

FOLDER = Path(page.__file__).parent
STYLE = (FOLDER / "style.css").read_text()
READABLE, VISIBLE = 4.5, 3.0
"""Least contrasts of text and of graphics (WCAG 2.2, criteria 1.4.3 and 1.4.11, level AA)."""

COLORS = [f"c{number}" for number in range(6)]


def palette(dark: bool) -> dict[str, tuple[int, ...]]:
    """Colours by name."""
    light, over = (
        {name: bytes.fromhex(code) for name, code in re.findall(r"--([\w-]+): #(\w{6});", block)}
        for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
    )
    assert light.keys() == over.keys()
    return {name: tuple(code) for name, code in (over if dark else light).items()}


def luminance(color: tuple[float, ...]) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [value / 255 for value in color]
    parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(over: tuple[int, ...], under: tuple[int, ...], share: float) -> tuple[float, ...]:
    return tuple(share * one + (1 - share) * other for one, other in zip(over, under, strict=True))


def test_contrast_is_that_of_the_definition():
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((118, 118, 118), (255, 255, 255)) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out(dark):
    color = palette(dark)
    pairs = [*itertools.product(("ink", "soft"), ("page", "card")), ("good", "good-back"), ("bad", "bad-back")]
    for text, back in pairs:
        assert contrast(color[text], color[back]) >= READABLE, (text, back)
    share = float(re.search(r"color-mix\(in srgb, var\(--own\) (\d+)%, var\(--card\)\)", STYLE)[1]) / 100
    for name in COLORS:
        assert contrast(color[name], color["card"]) >= VISIBLE, name
        assert contrast(color[name], mixed(color[name], color["card"], share)) >= READABLE, f"chip {name}"


def test_braces_are_balanced_and_every_class_of_the_style_is_used():
    assert STYLE.count("{") == STYLE.count("}")
    templates = "".join(path.read_text() for path in (FOLDER / "templates").iterdir())
    code = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    rules = re.sub(r"/\*.*?\*/|\{[^{}]*\}", " ", STYLE, flags=re.DOTALL)
    classes = set(re.findall(r"\.([a-z][\w-]*)", rules)) - set(COLORS)
    unused = {name for name in classes if not re.search(rf"\b{name}\b", templates + code)}
    assert classes and not unused
