"""The host waits for the device once a step, for the gradient norms, and once more where the log is written. Skipped
where there is no CUDA device; on tensors without
memory the same is counted by tests/dist/preflight/dry_run/test_dry_run.py."""

import pytest
import torch

from data.demo.make import make_demo
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

INTERVAL, STEPS = 4, 12


def _train(cfg, planted: bool) -> int:
    """Train with waits of the host refused outside of logging steps; how many steps they were refused in."""
    from mimo_train.optim import module_optimizer
    from mimo_train.training.callbacks import Callback
    from mimo_train.training.log import is_logging_step
    from mimo_train.training.pretrain import pretrain

    original, refused = module_optimizer.on_host, []

    def the_one_that_is_meant(numbers):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return original(numbers)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    class Refuse(Callback):
        def on_step_start(self, state):
            step = state.train_state.step + 1
            # In the first steps kernels are chosen, and buffers are made.
            free = step <= 2 or is_logging_step(cfg, step, STEPS)
            torch.cuda.set_sync_debug_mode("default" if free else "error")
            refused.extend([] if free else [step])

        def on_step_end(self, state, result):
            if planted and refused:
                torch.ones(1, device="cuda").item()

    module_optimizer.on_host = the_one_that_is_meant
    try:
        pretrain(cfg, callbacks=[Refuse()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len(refused)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Shards of the demo of images."""
    return make_demo(tmp_path_factory.mktemp("demo") / "digits", train_samples=480, held_out_samples=8, shards=2)


RUNS = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "packed, images of all sizes": (
        "train.precision=bf16",
        "data.pack=true",
        "encoder@modules.images.encoder=vit_tiny_native",
    ),
    "frozen": ("modules.images.freeze=[encoder]", "modules.images.prefetch_microbatches=1"),
}


def _config(demo, folder, *overrides: str):
    fixed = ("layout=one_process", "run.device=cuda", f"train.iters={STEPS}", f"train.log_interval={INTERVAL}")
    return config("vlm_digits", folder, demo, *fixed, *overrides)


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_nothing_else(name, demo, tmp_path):
    (refused,) = run_ranks(_train, 1, _config(demo, tmp_path, *RUNS[name]), False)
    assert refused == STEPS - STEPS // INTERVAL - 2


def test_a_wait_that_is_put_into_a_step_is_refused(demo, tmp_path):
    with pytest.raises(RankFailure, match="synchronizing CUDA operation"):
        run_ranks(_train, 1, _config(demo, tmp_path), True)
