"""A whole LLaVA: from its directory by one key, a step at any layout as transformers makes it, and out again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.text.tokens import build_tokenizer
from mimo_train.config.compose import load
from mimo_train.config.errors import UserError
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.documents import separate
from mimo_train.inputs.datasets import placeholders_of
from mimo_train.layout.run import resolve
from tests.dist.commands import command
from tests.dist.hf.models import make_llava, make_llava_of_dinov2, make_llava_of_siglip
from tests.dist.hf.one_step import BOUND, difference, ours, overrides, require_equal, theirs, together
from tests.dist.hf.test_pretrained import export, tensors
from tests.dist.ranks import run_ranks

_APART = "layout=two_processes"
LAYOUTS = {
    "one process": ("layout=one_process",),
    "tp2": ("layout=one_process", *(f"modules.{name}.layout.tp=2" for name in ("images", "language"))),
    "pp2": (_APART, *(f"modules.{name}.layout.pp=2" for name in ("images", "language"))),
    "tp2 pp2": (_APART, *(f"modules.{name}.layout.{one}=2" for name in ("images", "language") for one in ("tp", "pp"))),
}


def config(folder: Path, run_dir: Path, demo: Path, *own: str):
    """vlm_digits with the directory as all its modules."""
    steps = ("train.global_batch_size=4", "train.micro_batch_size=2", "data.sequence_length=160")
    return load("vlm_digits", (*overrides(run_dir, demo), *steps, f"pretrained={folder}", *own))


@pytest.fixture(scope="module")
def computed(digits, tmp_path_factory) -> dict[str, Any]:
    """What a step is at every layout, and in transformers; the folders of their runs. The checkpoint of tp2 is of the
    weights before it."""
    root = tmp_path_factory.mktemp("llava")
    (one,) = run_ranks(_alone, 1, root, "llava", digits)
    found: dict[str, Any] = {"root": root, "one process": [one], "transformers": one["transformers"]}
    for name in list(LAYOUTS)[1:]:
        cfg = config(root / "llava", root / name, digits, *LAYOUTS[name])
        found[name] = run_ranks(ours, resolve(cfg).layout.processes[-1] + 1, cfg, SAVED.get(name, ""))
    return found


SAVED = {"tp2": "before", "tp2 pp2": "after"}
"""When checkpoints are written, by layout."""


def _alone(root: Path, name: str, demo: Path) -> dict[str, Any]:
    """Make a directory, and the step here and in transformers."""
    MADE[name](root / name)
    found = ours(config(root / name, root / "one process" / name, demo, *LAYOUTS["one process"]), "")
    return found | {"transformers": _expected(root / name, together(found.pop("batch")), root / "updated")}


MADE = {"llava": make_llava, "siglip": make_llava_of_siglip, "dinov2": make_llava_of_dinov2}


def _expected(folder: Path, whole: dict[str, np.ndarray], to: Path) -> dict[str, Any]:
    """In transformers: logits, a step of AdamW, the directory after it."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    normalise = AutoImageProcessor.from_pretrained(folder)
    pixels = normalise(list(whole["pixels"]), do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values
    found = theirs(model, whole, {"pixel_values": pixels})
    model.save_pretrained(to)
    return found | {"pixels": pixels.numpy()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_loss_and_gradient_norm_are_those_of_transformers(layout, computed):
    require_equal(computed[layout], computed["transformers"])


@pytest.mark.parametrize("tower", ["siglip", "dinov2"])
def test_other_towers(tower, digits, tmp_path):
    """SigLIP, of which the last layer is read and every patch is kept, and Qwen2 with tied embeddings; DINOv2."""
    (one,) = run_ranks(_alone, 1, tmp_path, tower, digits)
    require_equal([one], one["transformers"])


def test_a_composite_leaves_with_its_own_tokenizer_alone(computed, digits, tmp_path):
    """Its processor and placeholders count on it."""
    folder = computed["root"] / "llava"
    own = ("data.tokenizer=bytes", "modules.language.llm.vocab_size=400")
    cfg = resolve(config(folder, tmp_path / "run", digits, *own)).cfg
    tokenizer = build_tokenizer("bytes", placeholders_of(cfg).values())
    with pytest.raises(UserError, match=f"data.tokenizer: bytes is not the tokenizer of {folder}, whose processor"):
        separate(cfg, tokenizer, embedding_rows(cfg.llm, tokenizer.vocab_size))


def plain(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by names that are the same in all spellings."""
    return {name.replace("vision_model.", "").removeprefix("model."): one for name, one in tensors(folder).items()}


def test_what_comes_in_goes_out_bit_for_bit_by_the_names_of_hubs(computed, tmp_path):
    export(computed["root"] / "tp2", tmp_path / "out")
    came, went = plain(computed["root"] / "llava"), plain(tmp_path / "out")
    assert came.keys() == went.keys() and all(torch.equal(value, went[name]) for name, value in came.items())
    towers = [name for name in tensors(tmp_path / "out") if name.startswith("vision_tower.")]
    assert len(towers) > 40 and all(name.startswith("vision_tower.vision_model.") for name in towers)


def test_the_updated_weights_are_those_of_transformers_which_reads_them(computed, tmp_path):
    export(computed["root"] / "tp2 pp2", tmp_path / "out")
    came, went, start = (
        plain(folder) for folder in (computed["root"] / "updated", tmp_path / "out", computed["root"] / "llava")
    )
    assert came.keys() == went.keys()
    for name, value in came.items():
        # Of what the update has moved.
        assert (went[name] - value).abs().max() <= 1e-3 * (value - start[name]).abs().max() + 1e-7, name
    expected = computed["transformers"]
    ((wrong, logits, ids),) = run_ranks(_read, 1, tmp_path / "out", expected["ids"], expected["pixels"])
    assert wrong == [] and difference(logits, expected["after"]) < BOUND
    assert ids == 36, "tokens of an image, by the processor"


def _read(folder: Path, ids: np.ndarray, pixels: np.ndarray) -> tuple[list[str], np.ndarray, int]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    image = np.zeros((60, 90, 3), np.uint8)
    tokens = processor(text="<image>?", images=image)["input_ids"][0]
    model, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), pixel_values=torch.from_numpy(pixels)).logits
    wrong = [*found["missing_keys"], *found["unexpected_keys"]]
    return wrong, logits.numpy(), list(tokens).count(processor.image_token_id)


def test_generate_answers_from_its_checkpoint(computed, tmp_path):
    from PIL import Image

    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    asked = ["--image", str(tmp_path / "red.png"), "--prompt", "Which?", "--max-new-tokens", "2"]
    ((code, said),) = run_ranks(command, 1, ["generate", str(computed["root"] / "tp2"), *asked])
    assert code == 0, said
