"""Messages between ranks, and copies from the device to the host, that the loop adds to schedule and optimizer."""

from collections import Counter

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config

STEPS, INTERVAL = 10, 5

HOST_COPIES = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
"""Tensor methods that wait for the device."""

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
"""Operations of a device whose result, or its size, the host must know before it goes on."""


def _count_steps(cfg) -> tuple[Counter, Counter]:
    """What the steps of `train` cost, and what as many steps of schedule and optimizer alone cost."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from mimo_train.training.callbacks import Callback, Callbacks
    from mimo_train.training.loop import train
    from mimo_train.training.step.forward_step import record_losses
    from mimo_train.training.step.losses import divide_gradients
    from mimo_train.training.train_step import local_metrics, reduce_metrics
    from tests.dist.steps import Steps

    copies = {getattr(torch.Tensor, name): name for name in HOST_COPIES}

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                counts["messages"] += 1
            name = func.name().partition(".")[0]
            # A single value that is put by a mask is a masked fill.
            picks = name == "aten::index" or (name.startswith("aten::index_put") and args[2].numel() > 1)
            by_mask = picks and any(index is not None and index.dtype == torch.bool for index in args[1])
            counts["waits"] += by_mask or name in WAITS
            return func(*args, **(kwargs or {}))

    class Copies(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in copies:
                counts["host copies"] += 1
            return func(*args, **(kwargs or {}))

    class Between(Callback):
        """Counts from the start of the first step to the end of the last but one, without the end of the run."""

        def on_step_start(self, state):
            if state.train_state.step == STEPS:
                found.update(counts)

    counts, found = Counter(), Counter()
    run = Steps(cfg)
    data, losses = run.session.data, run.session.losses
    # The first step opens groups and buffers.
    with Messages(), Copies():
        counts.clear()
        train(run.session, run.step_func, Callbacks([Between()]))
        counts.clear()
        bare_step = record_losses(run.step_func, losses)
        for _ in range(STEPS):
            for chunk in run.model:
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            data.rewind()
            losses.begin()
            before = counts["waits"], counts["host copies"]
            run.pipeline.run(bare_step, data)
            sums = reduce_metrics(local_metrics(run.session), run.pipeline.device)
            divide_gradients(run.pipeline.chunks, sums["tokens"])
            counts["waits of microbatches"] += counts["waits"] - before[0] + counts["host copies"] - before[1]
            run.optimizer.step()
        bare = Counter(counts)
    return found, bare


@pytest.mark.parametrize("layout", ["one_process", "two_processes", "images_dp1_language_dp2"])
def test_a_logging_interval_costs_one_message_and_one_copy(layout, digits, tmp_path):
    overrides = (f"layout={layout}", f"train.iters={STEPS + 1}", f"train.log_interval={INTERVAL}")
    packed = ("data.pack=true",) if layout == "two_processes" else ()
    cfg = config("vlm_digits", tmp_path, digits, *overrides, *packed)
    world = {"one_process": 1, "two_processes": 2, "images_dp1_language_dp2": 3}[layout]
    for loop, bare in run_ranks(_count_steps, world, cfg):
        added = {kind: loop[kind] - bare[kind] for kind in ("messages", "host copies")}
        intervals = STEPS // INTERVAL
        # One more message: whether any rank could not read a sample of the first step.
        assert added["messages"] <= intervals + 1 and added["host copies"] <= intervals, (added, loop, bare)
        # What one rank says to itself is no message.
        assert bare["messages"] >= STEPS * (world > 1) and bare["host copies"] >= STEPS, "the count sees nothing"
        assert bare["waits of microbatches"] == 0, bare


def _count_steps_with_megatron_cores_join(cfg):
    from megatron.core.models.mimo.model.base import MimoModel

    from mimo_train.models.mimo import PlacedMimoModel

    PlacedMimoModel.get_text_embeddings = MimoModel.get_text_embeddings
    PlacedMimoModel.align_embeddings_by_token_positions = MimoModel.align_embeddings_by_token_positions
    return _count_steps(cfg)


def test_megatron_cores_join_of_features_waits_for_the_device(digits, tmp_path):
    """Needs `PlacedMimoModel.get_text_embeddings` and `align_embeddings_by_token_positions` no longer if this fails."""
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", f"train.iters={STEPS + 1}")
    ((_, bare),) = run_ranks(_count_steps_with_megatron_cores_join, 1, cfg)
    assert bare["waits of microbatches"] > STEPS
