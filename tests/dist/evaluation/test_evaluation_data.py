"""What `train` hands to a user at evaluations: data that is no loss, and the values."""

from pathlib import Path

from mimo_train.training.callbacks import Callback
from tests.dist.ranks import run_ranks
from tests.dist.runs import config


class Evaluations(Callback):
    """Notes what evaluations tell."""

    def __init__(self):
        self.seen: list[tuple[int, float | None]] = []

    def on_evaluation(self, state, values):
        self.seen.append((state.train_state.step, values.get("eval/loss")))


def _forward_step(state, data_iterator, model):
    """The shipped step, with a loss function that knows the other pattern: number of learned tokens as data."""
    from mimo_train.step.mimo_step import forward_step

    output, loss_func = forward_step(state, data_iterator, model)
    if loss_func is None:
        return output, None

    def either(output_tensor, non_loss_data: bool = False):
        return {"shape": tuple(output_tensor.shape)} if non_loss_data else loss_func(output_tensor)

    return output, either


def _train(cfg, given: bool) -> tuple[list, list, list, bool]:
    """(steps with values, data that was processed, calls of the function that gives data, trained after) of a rank."""
    from mimo_train.compat.setup import setup
    from mimo_train.compat.train import train

    evaluations, processed, asked = Evaluations(), [], []
    run = setup(cfg, callbacks=[evaluations])

    def give(model):
        asked.append(any(chunk.training for chunk in model))
        return "mine"

    def process(data, step, writer):
        writer.add_scalar("mine", len(data), step)
        processed.append((step, data))

    code = train(
        _forward_step,
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


def test_a_function_gives_data_instead_on_every_rank_in_evaluation_mode(digits, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    encoder, language = run(digits, tmp_path, given=True)
    assert encoder[1:] == ([], [False, False], True)
    assert language[1:] == ([(2, "mine"), (3, "mine")], [False, False], True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mine")] == [(2, 4.0), (3, 4.0)]
