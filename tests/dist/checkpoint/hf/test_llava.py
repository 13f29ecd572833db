"""A whole LLaVA: from its directory by one key, a step at any layout as transformers makes it, and out again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mimo_train.config.compose import load
from tests.dist.checkpoint.hf.models import make_llava, make_llava_of_siglip
from tests.dist.checkpoint.hf.test_pretrained import _command, export, tensors
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY
from tests.dist.steps import Steps

BOUND = 1e-5
"""Of the largest expected value."""
OPTIM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip_grad": 0.7}
LAYOUTS = {
    "one process": ("layout=one_process",),
    "tp2": ("layout=one_process", *(f"modules.{name}.layout.tp=2" for name in ("images", "language"))),
    "split, pp2": ("layout=two_processes", "modules.language.layout.pp=2"),
}


def config(folder: Path, run_dir: Path, demo: Path, *overrides: str):
    """vlm_digits with the directory as all its modules."""
    tiny = [key for key in TINY if not key.startswith(("modules.", "optim."))]
    places = (f"run.dir={run_dir}", f"data.shards={demo}/train", "data.validation_shards=", "data.demo=")
    optim = [f"optim.{name}={value}" for name, value in OPTIM.items()] + [
        "optim.decay=constant",
        "optim.warmup_iters=0",
    ]
    steps = ("train.iters=1", "train.global_batch_size=4", "train.micro_batch_size=2", "data.sequence_length=160")
    return load("vlm_digits", (*tiny, *places, *optim, *steps, f"pretrained={folder}", *overrides))


@pytest.fixture(scope="module")
def computed(digits, tmp_path_factory) -> dict[str, Any]:
    """What a step is at every layout, and in transformers; the folders of their runs."""
    root = tmp_path_factory.mktemp("llava")
    (one,) = run_ranks(_alone, 1, root, "llava", digits)
    found: dict[str, Any] = {"root": root, "one process": [one], "transformers": one["transformers"]}
    for name, ranks in (("tp2", 2), ("split, pp2", 3)):
        found[name] = run_ranks(_step, ranks, config(root / "llava", root / name, digits, *LAYOUTS[name]), name)
    return found


def _alone(root: Path, name: str, demo: Path) -> dict[str, Any]:
    """Make a directory, and the step here and in transformers."""
    MADE[name](root / name)
    ours = _step(config(root / name, root / "one process" / name, demo, *LAYOUTS["one process"]), "one process")
    return ours | {"transformers": _expected(root / name, ours.pop("batch"), root / "updated")}


MADE = {"llava": make_llava, "siglip": make_llava_of_siglip}


def _step(cfg, name: str) -> dict[str, Any]:
    """On a rank: logits, then a step; the checkpoint of tp2 is of the weights before it."""
    run = Steps(cfg)
    session = run.session
    session.data.advance()
    collected = run.pipeline.run(_logits(run.pipeline), session.data, forward_only=True, collect_non_loss_data=True)
    batch = [_arrays(microbatch) for microbatch in session.data.current.microbatches] if name == "one process" else None
    if name == "tp2":
        run.save()
    session.data.rewind()
    session.freeze_stages.apply(0)
    result = run._run._train_step()
    session.state.train_state.count(session.data.current.size, session.data.current.plan.tokens, result)
    if name != "tp2":
        run.save()
    groups = session.parts.pipeline.groups.collections
    return {
        "tp": groups["language"].tp.rank() if "language" in groups else 0,
        "logits": torch.cat(collected).numpy() if collected else None,
        "loss": next(map(float, result.losses.values()), None),
        "norm": result.grad_norm,
        "batch": batch,
    }


def _logits(pipeline):
    from mimo_train.step.mimo_step import get_batch

    def predict(iterator, model):
        batch = get_batch(iterator) | {"labels": None, "loss_mask": None}
        batch.setdefault("input_ids", None)
        output, _ = model(**batch)
        return output, lambda logits, non_loss_data: logits.detach().clone()

    return predict


def _arrays(microbatch: dict) -> dict[str, np.ndarray]:
    media = microbatch["modality_inputs"]["images"]
    names = ("input_ids", "labels", "loss_mask")
    return {name: microbatch[name].numpy().copy() for name in names} | {
        "pixels": media["images"]["pixels"].numpy().copy()
    }


def _expected(folder: Path, batch: list[dict], to: Path) -> dict[str, Any]:
    """In transformers: logits, a step of AdamW, the directory after it."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    whole = {name: torch.from_numpy(np.concatenate([part[name] for part in batch])) for name in batch[0]}
    normalise = AutoImageProcessor.from_pretrained(folder)
    pixels = normalise(list(whole["pixels"]), do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values
    logits = model(input_ids=whole["input_ids"], pixel_values=pixels).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), whole["labels"], reduction="none")
    loss = (losses * whole["loss_mask"]).sum() / whole["loss_mask"].sum()
    loss.backward()
    trained = [value for value in model.parameters() if value.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(trained, OPTIM["clip_grad"])
    groups = [
        {"params": [value for value in trained if (value.ndim > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, OPTIM["weight_decay"]), (False, 0.0))
    ]
    betas = OPTIM["beta1"], OPTIM["beta2"]
    torch.optim.AdamW(groups, lr=OPTIM["lr"], eps=OPTIM["eps"], betas=betas).step()
    model.save_pretrained(to)
    with torch.no_grad():
        after = model(input_ids=whole["input_ids"], pixel_values=pixels).logits
    shown = {"logits": logits.detach().numpy(), "after": after.numpy(), "pixels": pixels.numpy()}
    return shown | {"loss": loss.item(), "norm": norm.item(), "ids": whole["input_ids"].numpy()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_loss_and_gradient_norm_are_those_of_transformers(layout, computed):
    require_equal(computed[layout], computed["transformers"])


def test_a_tower_without_class_token_and_tied_embeddings(digits, tmp_path):
    """SigLIP, of which the last layer is read and every patch is kept, and Qwen2."""
    (one,) = run_ranks(_alone, 1, tmp_path, "siglip", digits)
    require_equal([one], one["transformers"])


def require_equal(ranks: list[dict], expected: dict) -> None:
    """Logits, loss and gradient norm of ranks together are those of transformers."""
    last = {rank["tp"]: rank["logits"] for rank in ranks if rank["logits"] is not None}
    logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)[..., : expected["logits"].shape[-1]]
    assert difference(logits, expected["logits"]) < BOUND
    (loss,) = {rank["loss"] for rank in ranks if rank["loss"] is not None}
    assert loss == pytest.approx(expected["loss"], rel=BOUND)
    assert all(rank["norm"] == pytest.approx(expected["norm"], rel=BOUND) for rank in ranks)
    assert expected["norm"] > OPTIM["clip_grad"], "or nothing is clipped"


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


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
    export(computed["root"] / "split, pp2", tmp_path / "out")
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
    assert ids == 36, "tokens of a picture, by the processor"


def _read(folder: Path, ids: np.ndarray, pixels: np.ndarray) -> tuple[list[str], np.ndarray, int]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    picture = np.zeros((60, 90, 3), np.uint8)
    tokens = processor(text="<image>?", images=picture)["input_ids"][0]
    model, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), pixel_values=torch.from_numpy(pixels)).logits
    wrong = [*found["missing_keys"], *found["unexpected_keys"]]
    return wrong, logits.numpy(), list(tokens).count(processor.image_token_id)


def test_generate_answers_from_its_checkpoint(computed, tmp_path):
    from PIL import Image

    Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
    asked = ["--image", str(tmp_path / "red.png"), "--prompt", "Which?", "--max-new-tokens", "2"]
    ((code, said),) = run_ranks(_command, 1, ["generate", str(computed["root"] / "tp2"), *asked])
    assert code == 0, said
