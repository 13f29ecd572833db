"""Runs whose encoder is a torch module, a user's own or one of transformers: layouts, recomputation, frozen parts,
weights at the start, checkpoints, exports."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from mimo_train.checkpoint import folders
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.commands import command
from tests.dist.ranks import run_ranks
from tests.dist.runs import BOUNDS, config, curve, largest_difference, train_on_ranks

RUN = """
defaults:
  - projector@modules.images.projector: mlp
  - llm@modules.language.llm: gpt_mini
  - data@data: digits
  - optim@optim: adamw
  - layout: one_process
  - _self_
{modules}
run: {{seed: 1234}}
train: {{global_batch_size: 16, micro_batch_size: 4, iters: 4}}
"""
OWN = "{family: tests.dist.own_encoder.ConvSpec}"
DP2 = "layout=images_dp2_language_dp2"


def plain(folder: Path, demo: Path, encoder: str, *overrides: str):
    """A tiny run in `folder` with these keys of its encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = f"modules: {{images: {{encoder: {encoder}}}}}" if encoder else ""
    (folder / "run.yaml").write_text(RUN.format(modules=modules))
    return config(str(folder / "run.yaml"), folder, demo, *overrides)


def of_directory(folder: Path, demo: Path, *overrides: str):
    """A tiny run in `folder` whose encoder is in a directory."""
    return plain(folder, demo, "", *overrides)


def make_dinov2(folder: Path) -> None:
    """A directory of a tiny model that transformers wrote. Run on a rank."""
    import torch
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    torch.manual_seed(5)
    model = Dinov2Model(Dinov2Config(**sizes, image_size=48, patch_size=16))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "BitImageProcessor", "do_center_crop": false, "do_resize": true,'
        ' "size": {"height": 48, "width": 48}, "resample": 3, "rescale_factor": 0.00392156862745098,'
        ' "image_mean": [0.05, 0.05, 0.05], "image_std": [0.25, 0.25, 0.25]}'
    )


def test_an_own_encoder_has_the_numbers_of_one_process_recomputed_and_resumed_at_dp2(digits, tmp_path):
    runs = {
        "one": (),
        "recomputed": ("modules.images.recompute=full",),
        "half": ("train.iters=2", "checkpoint.save_interval=2", "optim.decay=constant"),
    }
    curves = {
        name: curve(train_on_ranks(plain(tmp_path / name, digits, OWN, "optim.decay=constant", *overrides)))
        for name, overrides in runs.items()
    }
    loss, norm = largest_difference(curves["one"], curves["recomputed"])
    assert loss < BOUNDS.loss and norm < BOUNDS.norm
    resume = (f"checkpoint.resume={folders.newest(tmp_path / 'half')}", DP2, "optim.decay=constant")
    rest = curve(train_on_ranks(plain(tmp_path / "rest", digits, OWN, *resume)))
    loss, norm = largest_difference(curves["one"], curves["half"] + rest)
    assert loss < BOUNDS.loss and norm < BOUNDS.norm


def test_a_model_of_transformers_trains_at_dp2_and_comes_back(digits, tmp_path):
    path = tmp_path / "dinov2"
    run_ranks(make_dinov2, 1, path)
    keys = (f"modules.images.pretrained={path}", "modules.images.implementation=transformers", "optim.decay=constant")
    stop = ("checkpoint.save_interval=2", "train.iters=2")
    (begins,) = run_ranks(first_weight, 1, of_directory(tmp_path / "one", digits, *keys))
    one = curve(read_metrics(tmp_path / "one" / "metrics.jsonl"))
    two = curve(train_on_ranks(of_directory(tmp_path / "two", digits, *keys, DP2, *stop)))
    came = load_file(path / "model.safetensors")
    assert begins == came["embeddings.patch_embeddings.projection.weight"].flatten()[:4].tolist()
    frozen = of_directory(tmp_path / "frozen", digits, *keys, "modules.images.freeze=[encoder]", DP2)
    frozen_one = of_directory(tmp_path / "frozen_one", digits, *keys, "modules.images.freeze=[encoder]")
    assert max(largest_difference(*(curve(train_on_ranks(cfg)) for cfg in (frozen_one, frozen)))) < BOUNDS.norm
    # Frozen, it is written as the directory that it was.
    ((code, text),) = run_ranks(command, 1, ["export", str(tmp_path / "frozen_one"), "--to", str(tmp_path / "out")])
    assert code == 0 and f"images (dinov2): {tmp_path}/out/images" in text, text
    went = load_file(tmp_path / "out" / "images" / "model.safetensors")
    assert came.keys() == went.keys() and all(value.equal(went[name]) for name, value in came.items())
    assert run_ranks(_read_again, 1, tmp_path / "out" / "images") == [("Dinov2Model", [], 48, 3)]
    kept = tmp_path / "two" / "config.yaml"
    resume = (f"run.dir={tmp_path / 'rest'}", f"checkpoint.resume={folders.newest(tmp_path / 'two')}", "train.iters=4")
    rest = curve(train_on_ranks(config(str(kept), tmp_path / "rest", digits, "optim.decay=constant", *resume)))
    loss, norm = largest_difference(one, two + rest)
    assert loss < BOUNDS.loss and norm < BOUNDS.norm


def _read_again(folder: Path) -> tuple[str, list[str], int, int]:
    """Return class, missing and unexpected weights, side of images, and how they are resized."""
    from transformers import AutoImageProcessor, AutoModel

    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    images = AutoImageProcessor.from_pretrained(folder)
    wrong = [*info["missing_keys"], *info["unexpected_keys"]]
    return type(model).__name__, wrong, images.size["height"], int(images.resample)


def first_weight(cfg) -> list[float]:
    """Train; the first weights of the encoder's patches, as the run began."""
    from mimo_train.training.pretrain import pretrain
    from tests.dist.own_encoder_callbacks import FirstWeight

    seen = FirstWeight("encoders.images.model.model.embeddings.patch_embeddings.projection.weight")
    pretrain(cfg, callbacks=[seen])
    return seen.values


@pytest.mark.parametrize(
    ("axis", "key"), [("tp", "tp"), ("pp", "pp"), ("lora.rank", "lora.rank"), ("recompute", "recompute")]
)
def test_what_a_plain_encoder_cannot_do_is_a_fault(digits, tmp_path, axis, key):
    from mimo_train.config.errors import ConfigError
    from mimo_train.layout.run import resolve

    value = "selective" if axis == "recompute" else "2"
    place = f"modules.images.{'layout.' if axis in ('tp', 'pp') else ''}{key}"
    cfg = plain(tmp_path, digits, OWN, f"{place}={value}", "layout=two_processes")
    with pytest.raises(ConfigError) as error:
        resolve(cfg)
    assert [fault.key for fault in error.value.faults] == [place]
    assert "torch module" in str(error.value)
