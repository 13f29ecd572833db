"""Differences between two configs are named by the innermost key."""

from dataclasses import dataclass, field

import pytest

from encoders.transformers_media.spec import MediaImages
from mimo_train.checkpoint.resume.config_diff import MAY_CHANGE, key_changes, module_changes, plain
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig


@dataclass
class Part:
    weight: float = 1.0
    place: str = ""


@dataclass
class Section:
    parts: list[Part] = field(default_factory=list)
    named: dict[str, Part] = field(default_factory=dict)
    by_step: dict[int, Part] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def changes(before: Section, now: Section, free: frozenset[str] = frozenset()) -> list[str]:
    return list(key_changes(plain(before), now, "a", free))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"parts": [Part(), Part()]}, {"parts": [Part(), Part(weight=7.0)]}, ["a.parts[1].weight was 1.0, is 7.0"]),
        ({"named": {"x": Part()}}, {"named": {"x": Part(place="b")}}, ["a.named.x.place was , is b"]),
        ({"by_step": {3: Part()}}, {"by_step": {3: Part(2.0)}}, ["a.by_step.3.weight was 1.0, is 2.0"]),
        (
            {"parts": [Part(), Part(2.0)]},
            {"parts": [Part(3.0)]},
            ["a.parts[0].weight was 1.0, is 3.0", "a.parts[1] was {'weight': 2.0, 'place': ''}, and is gone"],
        ),
        ({"parts": [Part()]}, {"parts": []}, ["a.parts[0] was {'weight': 1.0, 'place': ''}, and is gone"]),
        ({"parts": []}, {"parts": [Part()]}, ["a.parts[0] is new: {'weight': 1.0, 'place': ''}"]),
        (
            {"named": {"x": Part(), "z": Part()}},
            {"named": {"y": Part(), "z": Part()}},
            [
                "a.named.x was {'weight': 1.0, 'place': ''}, and is gone",
                "a.named.y is new: {'weight': 1.0, 'place': ''}",
            ],
        ),
        ({"numbers": [1, 2]}, {"numbers": [1, 3]}, ["a.numbers was [1, 2], is [1, 3]"]),
        ({"weights": {"x": 1.0}}, {"weights": {"x": 2.0}}, ["a.weights was {'x': 1.0}, is {'x': 2.0}"]),
    ],
)
def test_the_innermost_key_is_named(before, now, said):
    assert changes(Section(**before), Section(**now)) == said
    assert changes(Section(**now), Section(**now)) == []


def test_keys_that_are_free_are_so_at_any_depth():
    before, now = Section(parts=[Part(place="b")]), Section(parts=[Part(2.0)])
    assert changes(before, now, frozenset({"place"})) == ["a.parts[0].weight was 1.0, is 2.0"]


def test_an_inner_key_that_a_record_lacks_means_its_default():
    before = {"parts": [{"weight": 1.0}]}
    assert list(key_changes(before, Section(parts=[Part()]), "a")) == []
    (said,) = key_changes(before, Section(parts=[Part(place="b")]), "a")
    assert said == "a.parts[0].place was , is b"


def test_what_a_record_has_in_the_place_of_a_section_is_named_whole():
    assert list(key_changes({"parts": ["x"]}, Section(parts=[Part()]), "a")) == [
        "a.parts[0] was x, is {'weight': 1.0, 'place': ''}"
    ]


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ({}, {"rank": 2}, ""),
        ({}, {"rank": 2, "quantization": "nf4"}, "a.lora.quantization is nf4, but its weights are not in 4 bits"),
        ({"rank": 2}, {"rank": 2, "quantization": "nf4"}, "a.lora.quantization was , is nf4"),
        ({"rank": 2}, {"rank": 2, "modules_to_save": ["embed_tokens"]}, ""),
    ],
)
def test_adapters_of_a_new_run_fit_the_weights_that_it_starts_from(before, now, key):
    config = {"modules": {"language": plain(ModuleConfig(lora=LoraConfig(**before)))}}
    changed = list(module_changes(config, "language", ModuleConfig(lora=LoraConfig(**now)), "a"))
    assert (key in changed[0]) if key else changed == []


def test_a_new_run_may_read_videos_and_their_sound_in_another_way():
    config = {"modules": {"images": plain(ModuleConfig(encoder=MediaImages()))}}
    videos = {"reads_videos": True, "video": {"fps": 1}, "sound": True}
    assert list(module_changes(config, "images", ModuleConfig(encoder=MediaImages(**videos)), "a")) == []
    assert not MAY_CHANGE & videos.keys(), "a resumed run would have other texts"
