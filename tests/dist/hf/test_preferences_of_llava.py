"""DPO of a LLaVA: three steps are those of a plain loop in torch with the class of transformers, on the same tokens."""

from pathlib import Path

import pytest

from data.demo.make import make_demo
from mimo_train.config.compose import load
from tests.dist.hf.models import make_llava
from tests.dist.hf.one_step import OPTIM, overrides
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps

STEPS, IMAGE_TOKENS = 3, 36
VALUES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")


def _both(folder: Path, demo: Path) -> tuple[list[dict], list[dict]]:
    """On a rank: values of each step here and in torch."""
    make_llava(folder / "llava")
    changes = (f"pretrained={folder / 'llava'}", "layout=one_process", "train.task=dpo", "data.sequence_length=160")
    changes += ("data.pad=sequence", "train.global_batch_size=4", "train.micro_batch_size=4", "optim.weight_decay=0")
    run = Steps(load("vlm_digits", (*overrides(folder / "run", demo), *changes, f"train.iters={STEPS}")))
    ours, batches = [], []
    for _ in range(STEPS):
        run.train(1)
        losses = {name: float(run.result.losses[name]) for name in VALUES}
        ours.append(losses | {"grad_norm": run.result.grad_norm})
        (batch,) = run.session.data.current.microbatches
        batches.append(batch)
    run.session.close()
    return ours, _in_torch(folder / "llava", batches)


def _in_torch(folder: Path, batches: list[dict]) -> list[dict]:
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    normalise = AutoImageProcessor.from_pretrained(folder)
    pad = model.config.image_token_id

    def logps(batch: dict) -> torch.Tensor:
        ids, labels, mask = (batch[name] for name in ("input_ids", "labels", "loss_mask"))
        images = list(batch["modality_inputs"]["images"]["images"]["pixels"])
        counts = (ids[::2] == pad).sum(1) // IMAGE_TOKENS
        of_samples = torch.tensor_split(torch.stack(images), counts.cumsum(0)[:-1])
        repeated = [image for of_sample in of_samples for _ in range(2) for image in of_sample]
        pixels = normalise(repeated, do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values
        log_probs = torch.log_softmax(model(input_ids=ids, pixel_values=pixels, use_cache=False).logits, -1)
        return (log_probs.gather(2, labels[..., None])[..., 0] * mask).sum(1).view(-1, 2)

    with torch.no_grad():
        references = [logps(batch) for batch in batches]
    betas = OPTIM["beta1"], OPTIM["beta2"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM["lr"], betas=betas, eps=OPTIM["eps"], weight_decay=0)
    found = []
    for batch, reference in zip(batches, references, strict=True):
        chosen, rejected = (0.1 * (logps(batch) - reference)).unbind(1)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM["clip_grad"])
        optimizer.step()
        values = (loss, chosen.mean(), rejected.mean(), (chosen - rejected).mean())
        found.append(dict(zip(VALUES, map(float, values), strict=True)) | {"grad_norm": float(norm)})
    return found


def test_steps_of_a_llava_are_those_of_a_plain_loop(tmp_path):
    demo = make_demo(
        tmp_path / "pairs", "digits_pairs", train_samples=16, held_out_samples=4, shards=1, text_only_fraction=0.0
    )
    ((ours, theirs),) = run_ranks(_both, 1, tmp_path, demo)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), (name, ours, theirs)
        for name in VALUES:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (name, ours, theirs)
    assert abs(ours[-1]["rewards/margins"]) > 1e-3
