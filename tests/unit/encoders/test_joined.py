"""Two encoders side by side: tokens, faults, and the arithmetic of both."""

import json
from dataclasses import replace

import pytest

from encoders.base import num_tokens
from encoders.joined.spec import JoinedSpec
from encoders.native.dino.spec import Dinov3Spec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.compose import from_dict, load, to_dict
from mimo_train.config.errors import ConfigError
from mimo_train.estimate.matmuls import Media, encoder_matmuls
from mimo_train.estimate.memory import stage_memory
from mimo_train.estimate.parameters import encoder_parameters
from mimo_train.layout.run import resolve

ENCODER = "modules.images.encoder"
PICKED = (f"encoder@{ENCODER}=clip_dinov2", "data.sequence_length=1024")


@pytest.fixture(scope="module")
def cfg():
    return load("vlm_digits", PICKED)


def changed(cfg, **keys):
    """The same run with other values of keys, which are written with `__` for dots."""
    plain = to_dict(cfg)
    for key, value in keys.items():
        section, *inner = key.split("__")
        at = plain["modules"]["images"]
        for name in (section, *inner[:-1]):
            at = at[name]
        at[inner[-1]] = value
    return from_dict(plain)


def test_features_are_as_wide_as_both_together(cfg):
    spec: JoinedSpec = cfg.modules["images"].encoder
    assert (spec.first.family, spec.second.family) == ("clip", "dinov2")
    assert num_tokens(spec, ProjectorSpec(merge=2), 77, 500) == 144
    assert spec.joined_width(2) == 4 * 2048
    assert spec.num_parameters() == spec.first.num_parameters() + spec.second.num_parameters()
    stages = [encoder_parameters(spec, stage=stage, stages=2) for stage in (0, 1)]
    assert sum(stages) == spec.num_parameters()
    assert from_dict(to_dict(cfg)) == cfg


def test_pixels_are_rounded_if_those_of_either_encoder_are(cfg):
    spec, exact = cfg.modules["images"].encoder, Dinov3Spec(image_size=336, patch_size=14, interpolation="bicubic")
    crop = replace(exact, resize="crop")
    assert spec.transform.rounded and not exact.transform.rounded
    assert not replace(spec, first=exact, second=exact).transform.rounded
    mixed = replace(spec, second=crop)
    assert mixed.transform == spec.transform and not mixed.joint_faults(1)


def test_what_is_computed_and_kept_is_that_of_both(cfg):
    spec, projector = cfg.modules["images"].encoder, ProjectorSpec(kind="linear")
    media = Media(patches=576, tokens=577, pairs=577**2)
    found = encoder_matmuls("images", spec, projector, 8, media)
    alone = [
        one for part in spec.parts.values() for one in encoder_matmuls("images", part, ProjectorSpec(), 8, media)[:-2]
    ]
    assert sum(one.forward + one.attention for one in found[:-1]) == sum(one.forward + one.attention for one in alone)
    assert {
        "encoders.images.first.patch_embedding.weight",
        "encoders.images.second.layers.layers.23.mlp.linear_fc2.weight",
    } <= {one.name for one in found}
    one = stage_memory(resolve(cfg), "images", 384)[0].memory.activations
    apart = [from_dict(to_dict(cfg)) for _ in spec.parts]
    for run, part in zip(apart, spec.parts.values(), strict=True):
        run.modules["images"].encoder = part
    each = [stage_memory(resolve(run), "images", 384)[0].memory.activations for run in apart]
    assert max(each) < one < sum(each)


@pytest.mark.parametrize(
    ("place", "value", "key", "words"),
    [
        ("first__famly", "clip", "first.famly", "unknown key"),
        ("first__patch_size", "x", "first.patch_size", "x"),
        ("second__image_size", 224, "second.image_size", "224, and that of the first is 336"),
        ("first__resize", "fixed", "second.resize", "fixed, bicubic, 0"),
        ("second__resize", "native", "second.resize", "fixed or crop"),
        ("first__keep_class_token", True, "second.patch_size", "makes 576 tokens"),
        ("first__patch_size", 16, "second.patch_size", "441 of the first"),
        ("second", None, "second", "there is none"),
        ("second", "clip", "second", "a mapping of keys"),
        ("second__layer_scale", 0.0, "second.layer_scale", "above 0"),
        ("second__layernorm_epsilon", float("nan"), "second.layernorm_epsilon", "finite"),
    ],
)
def test_what_cannot_be_joined_is_named(place, value, key, words, cfg):
    with pytest.raises(ConfigError) as error:
        resolve(changed(cfg, **{f"encoder__{place}": value}))
    lines = str(error.value).splitlines()
    assert any(line.startswith(f"{ENCODER}.{key}: ") and words in line for line in lines), lines


@pytest.mark.parametrize(("place", "value"), [("layout__tp", 5), ("lora__rank", 2), ("layout__pp", 30)])
def test_layouts_must_be_those_of_both(place, value, cfg):
    with pytest.raises(ConfigError) as error:
        resolve(changed(cfg, **{place: value}))
    key = f"modules.images.{place.replace('__', '.')}"
    assert any(line.startswith(f"{key}: ") for line in str(error.value).splitlines()), error.value


def test_a_part_has_a_directory_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dinov2", "hidden_size": 96}))
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [vlm_digits, _self_]\n"
        f"modules: {{images: {{encoder: {{family: joined, second_pretrained: {tmp_path}}}}}}}\n"
    )
    pick = f"encoder@{ENCODER}=clip_dinov2"
    with pytest.raises(ConfigError, match=rf"{ENCODER}.second.hidden_size: is 1024, and {tmp_path}/config.json makes"):
        load(str(file), [pick])
    same = [pick, f"{ENCODER}.second.hidden_size=96", f"{ENCODER}.second.num_attention_heads=12"]
    same += [f"{ENCODER}.second.num_layers=12", f"{ENCODER}.second.ffn_hidden_size=384", PICKED[1]]
    second = (
        resolve(load(str(file), [*same, f"{ENCODER}.second.shortest_edge=336"])).cfg.modules["images"].encoder.second
    )
    assert (second.image_size, second.position_size, second.hidden_size) == (336, 224, 96)
