"""A model of several parts of transformers, its media half as it is, computes, learns and answers as in transformers,
on any layout, and comes back bit for bit."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch

from data.errors import DataError
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.pretrained.config_of_directory import config_of_directory
from mimo_train.inputs.datasets import build_dataset, tokenizer_of
from mimo_train.layout.run import resolve
from tests.dist.hf.test_pretrained import tensors as stored_tensors
from tests.dist.models.media_models import (
    AS_IS,
    IMAGES_ALONE,
    MODELS,
    OMNI_KINDS,
    RATE,
    STEPS,
    exported,
    make,
    samples_of,
)
from tests.dist.models.test_composites import BOUND, LATER_BOUND, composed, tensors, train
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps, whole
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer

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
CASES += [(kind, "tp2") for kind in MODELS if kind not in ("internvl", "gemma3", AS_IS, IMAGES_ALONE)]
CASES += [(AS_IS, layout) for layout in ("one process", "packed", "dp2")] + [("qwen2_vl", "as is")]
CASES += [("audioflamingo3", "one process"), ("mistral3", "packed"), ("idefics3", "dp2"), ("qwen3_vl", "packed")]
CASES += [("qwen3_5", "one process"), ("qwen3_5_moe", "packed")]
CASES += [("glm4v_moe", "one process")]
CASES += [("smolvlm", "one process")]
CASES += [("paligemma", "one process"), ("paligemma", "packed")]
CASES += [("qwen2_5_omni", layout) for layout in ("one process", "dp2")] + [(IMAGES_ALONE, "packed")]


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
        "qwen3_omni_moe_thinker": experts,
        "gemma3": ["modules.language.layout.sp=true"] if layout == "tp2" else [],
    }.get(kind, [])
    name = "mixed_tiny" if kind in OMNI_KINDS else "vlm_digits"
    if kind in OMNI_KINDS:
        sizes = [override for override in LAYOUTS[layout] if override.startswith("modules.images.")]
        overrides += ["modules.audio.encoder.max_seconds=2", *(size.replace("images", "audio") for size in sizes)]
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
