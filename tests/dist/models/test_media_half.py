"""A model of several parts of transformers, its media half as it is, computes, learns and answers as in transformers,
on any layout, and comes back bit for bit."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch

from data.errors import DataError
from encoders.transformers_media.directory import _of_positions, hf_config
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.pretrained.config_of_directory import config_of_directory
from mimo_train.config.pretrained.fill_in import changed_choices
from mimo_train.inputs.datasets import build_dataset, media_of, tokenizer_of
from mimo_train.layout.run import resolve
from mimo_train.preflight.check.media import add_media
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.check.shards import Seen, _add_first_samples
from tests.dist.hf.test_pretrained import tensors as stored_tensors
from tests.dist.models.composites import file_of
from tests.dist.models.media_models import (
    AS_IS,
    EXTENSIONS,
    FRAMES,
    IMAGES_ALONE,
    MODELS,
    OMNI_KINDS,
    RATE,
    SOUND,
    STEPS,
    exported,
    heard,
    make,
    positions_in,
    samples_of,
)
from tests.dist.models.test_composites import BOUND, LATER_BOUND, composed, tensors, train
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps, whole
from tests.tars import write_tar
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer
from tests.videos import ODD_VIDEOS, make_video

LAYOUTS = {
    "one process": ("layout=one_process", "train.micro_batch_size=1"),
    "packed": ("layout=one_process", "data.pack=true", "train.recompute=full"),
    "dp2": ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2"),
    "tp2": ("layout=two_processes", "modules.images.layout.dp=2", "modules.language.layout.tp=2", "data.pack=true"),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Makes a family's model once: (folder, what transformers makes of its samples)."""

    @functools.cache
    def made(kind: str):
        folder = tmp_path_factory.mktemp(kind)
        return folder, run_ranks(make, 1, folder, kind)[0]

    return made


CASES = [(kind, layout) for kind in ("internvl", "gemma3") for layout in LAYOUTS]
LAYOUTS["pp2"] = ("layout=one_process", "modules.language.layout.pp=2", "modules.language.recompute=selective")
CASES += [("gemma3", "pp2")]
FSDP = tuple(f"modules.{name}.layout.fsdp=true" for name in ("images", "language"))
# One rank has no image in a microbatch.
LAYOUTS["fsdp2"] = (*LAYOUTS["dp2"], *FSDP, "train.micro_batch_size=1", "train.recompute=full")
LAYOUTS["fsdp2 apart"] = ("layout=two_processes", *LAYOUTS["fsdp2"][1:])
CASES += [(AS_IS, "fsdp2"), (AS_IS, "fsdp2 apart")]
LAYOUTS["as is"] = ("layout=one_process", "train.micro_batch_size=1", "modules.language.implementation=transformers")
ONE_PROCESS = f"qwen2_5_omni{SOUND}"
CASES += [(kind, "tp2") for kind in MODELS if kind not in ("internvl", "gemma3", AS_IS, IMAGES_ALONE, ONE_PROCESS)]
CASES += [(AS_IS, layout) for layout in ("one process", "packed", "dp2")] + [("qwen2_vl", "as is")]
CASES += [("audioflamingo3", "one process"), ("mistral3", "packed"), ("idefics3", "dp2"), ("qwen3_vl", "packed")]
CASES += [("qwen3_5", "one process"), ("qwen3_5_moe", "packed")]
CASES += [("glm4v_moe", "one process")]
CASES += [("smolvlm", "one process")]
CASES += [("paligemma", "one process"), ("paligemma", "packed")]
CASES += [(ONE_PROCESS, "one process"), ("qwen2_5_omni", "dp2"), (IMAGES_ALONE, "packed")]


def _assert_curve(curve, expected):
    """Gradient norms follow the weights, which rounding moves from the second step on."""
    for column, bound in ((0, BOUND), (1, LATER_BOUND)):
        assert np.array(curve)[:, column] == pytest.approx(np.array(expected)[:, column], rel=bound)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_media_half_learns_as_in_transformers(published, kind, layout, tmp_path):
    if kind == "smolvlm":
        pytest.importorskip("num2words")  # which its processor wants, for videos alone
    folder, expected = published(kind)
    overrides = [f"train.iters={STEPS}", "data.sequence_length=300", *LAYOUTS[layout]]
    experts = ["modules.language.llm.router_balancing=none"]
    experts += ["modules.language.layout.sp=true"] if layout == "tp2" else []
    overrides += {
        "audioflamingo3": ["modules.images.encoder.max_seconds=2"],
        "smolvlm": ["data.sequence_length=600"],
        "qwen3_vl": ["modules.images.implementation=transformers"],
        "qwen3_vl_moe": ["modules.images.implementation=transformers", *experts],
        **dict.fromkeys(("qwen3_5_moe", "glm4v_moe"), experts),
        f"qwen3_omni_moe_thinker{SOUND}": experts,
        "gemma3": ["modules.language.layout.sp=true"] if layout == "tp2" else [],
    }.get(kind, [])
    is_omni = kind.removesuffix(SOUND) in OMNI_KINDS
    name = "mixed_tiny" if is_omni else "vlm_digits"
    if is_omni:
        sizes = [override for override in LAYOUTS[layout] if override.startswith("modules.images.")]
        seconds = 6 if kind.endswith(SOUND) else 2
        overrides += [f"modules.audio.encoder.max_seconds={seconds}"]
        overrides += [size.replace("images", "audio") for size in sizes]
    if kind.endswith(SOUND):
        overrides += ["modules.images.encoder.sound=true", f"modules.images.encoder.video={json.dumps(FRAMES)}"]
    cfg = composed(folder, tmp_path / "run", *overrides, name=name)
    ranks = run_ranks(train, resolve(cfg).layout.processes[-1] + 1, cfg, samples_of(kind)[0][0])
    last = {rank["tp"]: rank["logits"] for rank in ranks if "logits" in rank}
    logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)
    if "data.pack=true" not in overrides:
        for number, theirs in enumerate(expected["logits"]):
            ids = expected["ids"][number]
            if len(logits) == len(expected["logits"]):
                assert (
                    np.abs(logits[number, : len(ids), : theirs.shape[1]] - theirs).max() < BOUND * np.abs(theirs).max()
                )
                assert ranks[0]["ids"][number, : len(ids)].tolist() == ids
                if kind.endswith(SOUND):
                    positions = expected["positions"][number]
                    assert (ranks[0]["positions"][:, number, : len(ids)] == positions).all()
    curve = [(loss, norm) for _, loss, norm in whole([rank["curve"] for rank in ranks])]
    _assert_curve(curve, expected["curve"])
    if layout in ("one process", "as is"):
        assert ranks[0]["answer"] == expected["answer"] and len(set(expected["answer"])) > 2
    checkpoint = ranks[0]["before" if layout == "tp2" else "after"]
    (found,) = run_ranks(exported, 1, checkpoint, tmp_path / "out", kind)
    assert found["keys"] == []
    if layout != "tp2":
        for name, value in expected["after"].items():
            assert np.abs(found["parameters"][name] - value).max() < 1e-2 * RATE, name
        return
    before, after = tensors(folder / "model"), tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(value.tobytes() == after[name].tobytes() for name, value in before.items())
    for ours, theirs in zip(found["logits"], expected["logits"], strict=True):
        assert np.abs(ours - theirs).max() < 1e-6 * np.abs(theirs).max()
    files = {file.name for file in (folder / "model").iterdir() if "safetensors" not in file.name}
    assert files <= {file.name for file in (tmp_path / "out").iterdir()}


def test_what_a_class_keeps_in_fp32_stays_fp32_in_bf16(published, tmp_path):
    folder, _ = published("internvl")
    cfg = composed(
        folder,
        tmp_path / "run",
        "layout=one_process",
        "train.iters=1",
        "data.sequence_length=300",
        "train.precision=bf16",
    )
    ((code, said),) = run_ranks(
        _export_half_in_fp32, 1, cfg, ["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]
    )
    assert code == 0, said
    types = {name: value.dtype for name, value in stored_tensors(tmp_path / "out").items()}
    kept = {name for name in types if "multi_modal_projector" in name or "vision_tower" in name}
    assert kept and {name for name, dtype in types.items() if dtype == torch.float32} == kept


def _export_half_in_fp32(cfg, arguments: list[str]):
    import transformers

    from tests.dist.commands import command
    from tests.dist.steps import Steps

    transformers.InternVLForConditionalGeneration._keep_in_fp32_modules_strict = [
        "vision_tower",
        "multi_modal_projector",
    ]
    run = Steps(cfg)
    run.train(1)
    run.save()
    return command(arguments)


def _without_blocks(cfg) -> str:
    """On a rank: what a forward step is told that gives the model no blocks."""
    from mimo_train.training.step import forward_step

    forward_step.MODEL_INPUTS = tuple(name for name in forward_step.MODEL_INPUTS if name != "blocks")
    with pytest.raises(UserError) as error:
        train(cfg)
    return str(error.value)


def test_a_forward_step_that_drops_the_tokens_that_see_later_ones_is_named(published, tmp_path):
    cfg = composed(published("gemma3")[0], tmp_path, "data.sequence_length=300", *LAYOUTS["one process"])
    assert run_ranks(_without_blocks, 1, cfg)[0].startswith("the forward step must pass `blocks` to the model")


def _failed(cfg) -> str:
    """On a rank: why a run does not start."""
    with pytest.raises(ValueError) as error:
        train(cfg)
    return str(error.value)


def test_a_processor_of_another_model_is_named(published, tmp_path):
    """By a start too, which reads no weights before features were tried."""
    shutil.copytree(published("gemma3")[0], tmp_path / "gemma3")
    file = tmp_path / "gemma3/model/config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["image_size"] *= 2
    file.write_text(json.dumps(config))
    cfg = composed(tmp_path / "gemma3", tmp_path / "run", "data.sequence_length=300", *LAYOUTS["one process"])
    (said,) = run_ranks(_failed, 1, cfg)
    assert said.startswith(f"{file.parent}: Gemma3ForConditionalGeneration cannot compute an item that its processor")


def test_a_media_half_resumes_at_another_dp(published, tmp_path):
    folder, expected = published("qwen2_5_omni")
    of_all = (f"train.iters={STEPS}", "data.sequence_length=300", "+modules.audio.encoder.max_seconds=2")
    ((checkpoint, _),) = run_ranks(_steps, 1, composed(folder, tmp_path / "1", *of_all, *LAYOUTS["one process"]), 2)
    dp2 = (*LAYOUTS["dp2"], "+modules.audio.layout.dp=2", f"checkpoint.resume={checkpoint}")
    ranks = run_ranks(_steps, 2, composed(folder, tmp_path / "2", *of_all, *dp2), STEPS - 2)
    curve = [(loss, norm) for _, loss, norm in whole([curve for _, curve in ranks])]
    _assert_curve(curve, expected["curve"][2:])


def _steps(cfg, steps: int) -> tuple:
    """A checkpoint behind some steps, and their curve."""
    run = Steps(cfg)
    curve = run.train(steps)
    return run.save(), curve


def test_a_media_half_that_does_not_fit_its_run_is_named(published, tmp_path):
    folder, _ = published("internvl")
    alone = f"modules.images.pretrained={folder / 'model'}"
    with pytest.raises(ConfigError, match="^modules.images.pretrained: .* need its own language model"):
        composed(folder, tmp_path, "pretrained=", alone)
    with pytest.raises(ConfigError, match="whose media half modules.images has already"):
        composed(folder, tmp_path, f"+modules.more.pretrained={folder / 'model'}")
    omni, _ = published("qwen2_5_omni")
    modules = config_of_directory(omni / "model").modules
    # Its extractor cuts audio of more than 2 s.
    assert [*modules] == ["images", "audio", "language"] and modules["audio"].encoder.max_seconds == 2
    assert config_of_directory(omni / "model", seconds=2.5).modules["audio"].encoder.max_seconds == 3
    with pytest.raises(ConfigError, match="modules.images has already. .* needs a name that begins with audio$"):
        composed(omni, tmp_path, f"+modules.sounds.pretrained={omni / 'model'}")
    with pytest.raises(ConfigError, match="^modules.audio.encoder.max_seconds: is 3, but .* cuts .* Set it to 2"):
        resolve(composed(omni, tmp_path, "data.sequence_length=300", "+modules.audio.encoder.max_seconds=3"))
    with pytest.raises(ConfigError, match="one clip takes .* or lower modules.audio.encoder.max_seconds$"):
        resolve(composed(omni, tmp_path, "data.sequence_length=20", "+modules.audio.encoder.max_seconds=2"))
    sound = ("data.sequence_length=300", "modules.images.encoder.sound=true")
    with pytest.raises(
        ConfigError, match="^modules.images.encoder.sound: .* InternVLProcessor does not read the sound"
    ):
        resolve(composed(folder, tmp_path, *sound))
    with pytest.raises(ConfigError, match="^modules.images.encoder.sound: .* requires one module .* modules: none"):
        resolve(composed(published(f"qwen2_5_omni{SOUND}")[0], tmp_path, *sound))
    for key in ("optim.projector_lr=1e-3", "freeze=[projector]", "freeze_until={projector: 2}"):
        with pytest.raises(ConfigError, match=r"names the projector, which is a part of the encoder here"):
            resolve(composed(folder, tmp_path, f"modules.images.{key}"))
    with pytest.raises(ConfigError, match="^modules.images.encoder.dropout: is 0.2: set it to 0 as in config.json"):
        resolve(composed(folder, tmp_path, "data.sequence_length=300", "modules.images.encoder.dropout=0.2"))
    gemma, language = published("gemma3")[0], "modules.language"
    with pytest.raises(ConfigError, match=rf"^{language}.layout.cp: .*a sequence with tokens.* see each other"):
        resolve(composed(gemma, tmp_path, "data.sequence_length=300", f"{language}.layout.cp=2"))
    packed = (f"{language}.implementation=transformers", "data.pack=true")
    with pytest.raises(ConfigError, match=r"^data.pack: is true, but .* mixes documents with tokens of an image"):
        resolve(composed(gemma, tmp_path, "data.sequence_length=300", *packed))
    both_ways = shutil.copytree(gemma, tmp_path / "both ways")
    config = json.loads((both_ways / "model" / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = True
    (both_ways / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="use_bidirectional_attention is True: the model here has None or False only"):
        composed(both_ways, tmp_path)
    cfg = composed(folder, tmp_path, "data.sequence_length=300")
    tokens = {"other_token": "<|other|>"}
    cfg.data.tokenizer = str(save_tokenizer(tmp_path / "other", QWEN_VL, model_specific_special_tokens=tokens))
    with pytest.raises(
        DataError, match="^data.tokenizer: .* is not the tokenizer of .* whose processor makes the tokens"
    ):
        build_dataset(cfg, tokenizer_of(cfg))


@pytest.mark.parametrize("kind", OMNI_KINDS)
def test_odd_videos_with_sound_are_read_as_in_transformers(published, kind, tmp_path):
    folder, _ = published(f"{kind}{SOUND}")
    run_ranks(_compare_sound, 1, folder, tmp_path)


def _compare_sound(folder, tmp_path):
    """Compare tokens, positions, pixels and frequencies of videos, each alone, and of several media in one sample."""
    from transformers import AutoProcessor

    small = {"height": 24, "width": 32, "seed": 1}
    videos = {
        "longer": ODD_VIDEOS["longer sound"](),
        "longer, webm": ODD_VIDEOS["longer sound, webm"](),
        "of two frames": make_video(images=2, rate=1, sound=0.5, **small),
        "shorter": make_video("mp4", "libx264", images=90, rate=15, sound=0.3, **small),
        "wide": make_video(images=4, height=24, width=400, seed=1, sound=0.1),
        "silent": make_video(**small),
    }
    samples = [[raw, "what is said?"] for raw in videos.values()]
    several = ["hear ", (9000,), " and ", videos["silent"], (30, 50), videos["shorter"], videos["silent"], "?"]
    members = []
    for number, parts in enumerate([*samples, several]):
        media = [part for part in parts if not isinstance(part, str)]
        messages = [{"role": "user", "content": _content(parts)}, {"role": "assistant", "content": "a"}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        for at, part in enumerate(media):
            is_video = isinstance(part, bytes)
            name = f"{number}.{at}.{'mp4' if is_video else EXTENSIONS[len(part)]}"
            members.append((name, part if is_video else file_of(part)))
    shutil.copytree(folder / "model", tmp_path / "model")
    write_tar(tmp_path / "samples.tar", members)
    options = f"modules.images.encoder.video={json.dumps(FRAMES)}"
    overrides = ("layout=one_process", "modules.audio.encoder.max_seconds=6", "data.sequence_length=400", options)
    silent = composed(tmp_path, tmp_path / "run", *overrides, name="mixed_tiny")
    cfg = composed(tmp_path, tmp_path / "run", *overrides, "modules.images.encoder.sound=true", name="mixed_tiny")
    tokenizer, report = tokenizer_of(cfg), Report()
    dataset, processor = build_dataset(cfg, tokenizer), AutoProcessor.from_pretrained(tmp_path / "model")
    unheard, rows = build_dataset(silent, tokenizer), []
    assert dataset.lengths_keys() != unheard.lengths_keys()
    for each, samples_of_it in ((silent, unheard), (cfg, dataset)):
        _add_first_samples(report, each, "data.shards", samples_of_it, tokenizer, Seen(), rows)
    (note,) = (note for note in report.notes if "sound" in note)
    assert note.startswith(
        "data.shards: 6 of the first 7 samples have videos with sound, which is not read. Set modules"
    )
    assert ("first 7", "video sounds of audio", "0.9 on average, 0 to 1 a sample") in rows
    identities = [[media.identity for media in media_of(each)] for each in (silent, cfg)]
    assert all(before != after for before, after in zip(*identities, strict=True))
    change = "modules.images.encoder.sound is True in this run and False in the exported files"
    assert change in changed_choices(cfg, "images")
    add_media(report, cfg)
    assert report.tables[-1].rows[1][:3] == ("audio", "sound", "modules.images.encoder.sound")
    for number, parts in enumerate([*samples, several]):
        text = processor.apply_chat_template([{"role": "user", "content": _content(parts)}], add_generation_prompt=True)
        batch = heard(processor, parts, text + "a<|im_end|>\n")
        sample, bad = dataset.read_text(number)
        assert bad is None, (parts[1:], bad)
        config = hf_config(str(tmp_path / "model"))
        ids = batch["input_ids"][0]
        expected = ids.where(ids != config.video_token_id, config.image_token_id)
        assert sample.input_ids[: sample.length].tolist() == expected.tolist(), number
        (images, bad), (sounds, bad_sound) = (dataset.read_media(number, name) for name in ("images", "audio"))
        assert bad is None and bad_sound is None
        pixels = [item["pixel_values_videos"] for item in images if "pixel_values_videos" in item]
        assert torch.cat(pixels).equal(batch["pixel_values_videos"])
        assert len(sounds) == len(batch.get("input_features", ()))
        positions = _positions_by_items(tmp_path / "model", processor.tokenizer, batch)
        np.testing.assert_array_equal(sample.positions[:, : sample.length], positions)
        if parts is not several:
            whole_text = positions_in(_of_positions(str(tmp_path / "model")), batch)
            np.testing.assert_array_equal(whole_text, positions)
            for sound, frequencies in zip(sounds, batch.get("input_features", ()), strict=True):
                assert sound["input_features"][0].equal(frequencies[:, : sound["input_features"].size(-1)])
            assert [item["feature_attention_mask"].sum() for item in sounds] == [
                *batch.get("feature_attention_mask", torch.zeros(0, 1)).sum(-1)
            ]


def _positions_by_items(folder, tokenizer, batch):
    """Positions of the class, a piece of the text for each item: it takes no silent video next to one with sound."""
    ids, config, model = batch["input_ids"][0], hf_config(str(folder)), _of_positions(str(folder))
    vision_end, audio_end = tokenizer.convert_tokens_to_ids(["<|vision_end|>", "<|audio_eos|>"])
    is_end = (ids == vision_end) | ((ids == audio_end) & (ids.roll(-1) != vision_end))
    remaining = {
        name: iter(batch.get(name, ())) for name in ("image_grid_thw", "video_grid_thw", "video_second_per_grid")
    }
    lengths, parts, following = iter(batch.get("feature_attention_mask", torch.zeros(0, 1)).sum(-1)), [], 0
    for piece in ids.tensor_split(1 + is_end.nonzero()[:, 0]):
        has_image, has_video, has_sound = (
            bool((piece == getattr(config, f"{kind}_token_id")).any()) for kind in ("image", "video", "audio")
        )
        sizes = {"use_audio_in_video": has_video and has_sound}
        sizes |= {"image_grid_thw": next(remaining["image_grid_thw"])[None]} if has_image else {}
        if has_video:
            sizes["video_grid_thw"] = next(remaining["video_grid_thw"])[None]
            sizes["second_per_grids"] = torch.as_tensor(next(remaining["video_second_per_grid"]))[None]
        sizes |= {"audio_seqlens": next(lengths)[None]} if has_sound else {}
        piece = piece[None]
        positions = model.get_rope_index(input_ids=piece, attention_mask=torch.ones_like(piece), **sizes)[0][:, 0]
        parts.append(positions + following)
        following += positions[0, -1] + 1
    return torch.cat(parts, 1).numpy()


def _content(parts):
    kinds = {1: "audio", 2: "image"}
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "video" if isinstance(part, bytes) else kinds[len(part)]}
        for part in parts
    ]
