"""What `train` hands to a user at evaluations: data that is no loss, and the values."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from mimo_train.training.callbacks import Callback
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_on_ranks
from tests.tars import write_tar


class Evaluations(Callback):
    """Notes what evaluations tell."""

    def __init__(self):
        self.seen: list[tuple[int, float | None]] = []

    def on_evaluation(self, state, values):
        self.seen.append((state.train_state.step, values.get("eval/loss")))


def _forward_step(state, data_iterator, model):
    """The shipped step, with a loss function that knows the other pattern: number of learned tokens as data."""
    from mimo_train.training.step.forward_step import mimo_forward_step

    output, loss_func = mimo_forward_step(state, data_iterator, model)
    if loss_func is None:
        return output, None

    def either(output_tensor, non_loss_data: bool = False):
        return {"shape": tuple(output_tensor.shape)} if non_loss_data else loss_func(output_tensor)

    return output, either


def _train(cfg, given: bool, shipped: bool = False) -> tuple[list, list, list, bool]:
    """(steps with values, data that was processed, calls of the function that gives data, trained after) of a rank."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train
    from mimo_train.training.pretrain import default_forward_step

    evaluations, processed, asked = Evaluations(), [], []
    run = setup(cfg, callbacks=[evaluations])

    def give(model):
        asked.append(any(chunk.training for chunk in model))
        return "mine"

    def process(data, step, writer):
        writer.add_scalar("mine", len(data), step)
        if shipped:
            losses = sum((each["losses"] * each["loss_mask"]).sum() for each in data)
            data = float(losses / sum(each["loss_mask"].sum() for each in data))
        processed.append((step, data))

    code = train(
        default_forward_step(cfg) if shipped else _forward_step,
        run.model,
        run.optimizer,
        run.scheduler,
        run.train_data_iterator,
        run.valid_data_iterator,
        run.state,
        run.checkpointing_context,
        process,
        give if given else None,
    )
    assert code == 0
    run.close()
    return evaluations.seen, processed, asked, all(chunk.training for chunk in run.model)


def run(digits: Path, run_dir: Path, given: bool) -> list:
    cfg = config(
        "vlm_digits",
        run_dir,
        digits,
        "layout=two_processes",
        "train.iters=3",
        "train.eval_interval=2",
        "train.eval_samples=4",
        f"data.validation_shards={digits}/held_out",
        "log.tensorboard=true",
        "data.sequence_length=72",
    )
    return run_ranks(_train, 2, cfg, given)


def test_the_last_stage_gives_data_without_a_function_for_it(digits, tmp_path):
    encoder, language = run(digits, tmp_path, given=False)
    assert encoder == ([(2, None), (3, None)], [], [], True)
    seen, processed, _, training = language
    assert [step for step, _ in seen] == [2, 3] and all(loss > 0 for _, loss in seen) and training
    # Two microbatches of eight samples, in the order of the held-out ones.
    assert processed == [(step, [{"shape": (8, 72)}] * 2) for step in (2, 3)]


@pytest.mark.parametrize("name", ["vlm_digits", "gpt_tiny"])
def test_the_shipped_steps_give_the_loss_of_every_token(name, digits, prose, tmp_path):
    demo, layout = (digits, "two_processes") if name == "vlm_digits" else (prose, "language_pp2")
    held_out = (f"data.validation_shards={demo}/held_out", "train.eval_samples=16", "log.tensorboard=true")
    cfg = config(name, tmp_path, demo, f"layout={layout}", "train.iters=1", *held_out)
    _, (seen, processed, _, _) = run_ranks(_train, 2, cfg, False, True)
    assert [(step, pytest.approx(loss)) for step, loss in seen] == processed


def test_a_function_gives_data_instead_on_every_rank_in_evaluation_mode(digits, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    encoder, language = run(digits, tmp_path, given=True)
    assert encoder[1:] == ([], [False, False], True)
    assert language[1:] == ([(2, "mine"), (3, "mine")], [False, False], True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mine")] == [(2, 4.0), (3, 4.0)]


def image() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (48, 32), "red").save(content, "PNG")
    return content.getvalue()


def turns(*texts: str) -> bytes:
    """A record of a person and an assistant in turn."""
    words = [{"from": ("human", "gpt")[at % 2], "value": text} for at, text in enumerate(texts)]
    return json.dumps({"conversations": words}).encode()


ODD = {
    "cut before its answer": (1, turns("<image>\n" + "q" * 500, "seven")),
    "bad, with a place for its image": (1, turns("<image> <image>\nWhat?", "seven")),
    "bad, without any token": (0, turns()),
    "an image in its answer": (2, turns("<image>\nWhat?", "like <image>")),
    "an image behind its answer": (2, turns("<image>\nWhat?", "seven", "<image>\nAnd this?")),
}


@pytest.fixture
def odd(tmp_path) -> Path:
    """Shards of whole samples, and one of each of ODD in the middle."""
    whole = (1, turns("<image>\nWhat?", "seven"))
    samples = [whole, whole, *ODD.values(), *[whole] * 9]
    members = []
    for key, (images, record) in enumerate(samples):
        members += [(f"{key:03d}.{at}.png", image()) for at in range(images)]
        members.append((f"{key:03d}.json", record))
    return write_tar(tmp_path / "odd" / "a-000000.tar", members).parent


def test_samples_that_cannot_be_answered_are_evaluated_and_packed_like_any_others(odd, digits, tmp_path):
    def lines(*overrides: str) -> list[dict]:
        places = (f"data.shards={odd}", f"data.validation_shards={odd}", "data.max_bad_samples=9")
        options = ("layout=two_processes", "train.iters=2", "train.report_samples=8", *overrides)
        run_dir = tmp_path / f"run{len(overrides)}"
        found = train_on_ranks(config("vlm_digits", run_dir, digits, *places, *options))
        shown = json.loads((run_dir / "samples.json").read_text())
        assert len(shown) == 8 and all(one["truth"] for one in shown), "but for those without an answer"
        return found

    unpacked, packed = lines(), lines("data.pack=true")
    assert curve(packed) == [pytest.approx(point, rel=1e-5) for point in curve(unpacked)]
    (values,) = [line for line in unpacked if "eval/loss" in line]
    assert values["eval/samples"] == 16 - 3, "but for the one that is cut, and the two that are bad"
