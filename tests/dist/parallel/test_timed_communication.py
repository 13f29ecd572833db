"""What ranks wait for each other is timed where it happens: in the bridge, and between stages."""

from contextlib import contextmanager

import torch

from data.order.step_plan import plan_in_order
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import config


def test_the_bridge_and_the_stages_are_timed_by_name(tmp_path):
    cfg = config(
        "vlm_digits", tmp_path, tmp_path, "layout=two_processes", "modules.language.layout.pp=2",
        "train.global_batch_size=2", "train.micro_batch_size=2",
    )  # fmt: skip
    encoder, first_stage, last_stage = run_ranks(one_microbatch_forward, 3, cfg)
    assert encoder == ["bridge_wait"]
    assert first_stage == ["bridge_wait", "pipeline_wait"]
    assert last_stage == ["pipeline_wait"]


def one_microbatch_forward(cfg):
    """Names of the intervals of this rank."""
    from mimo_train.models.transformer_config import language_config
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.bridge.communicator import ModuleCommunicator
    from mimo_train.parallel.bridge.shapes import StepShapes
    from mimo_train.parallel.groups import build_groups

    run, device = resolve(cfg), devices.install("cpu", 0)
    devices.init_process_group("cpu", 1.0)
    transformer, names, shapes = language_config(cfg, run.layout), [], StepShapes()
    widths, length = {"images": 32, "language": transformer.hidden_size}, 24
    plan = plan_in_order(0, 2, 2, 1, length)
    shapes.follow(plan, {"images": [[3, 0]]}, {"images": [[3, 0]]}, [0])

    @contextmanager
    def watch(name):
        names.append(name)
        yield

    groups = build_groups(run.layout)
    width = transformer.hidden_size
    communicator = ModuleCommunicator(run, groups, transformer, widths, shapes, device, watch)
    here = communicator.rank_module_map
    if "images" in here:
        communicator.send_forward({"images": torch.ones(3, width)})
        return names
    received = communicator.recv_forward(tensor_shape=(0, 0, 0))
    if here["language"].pp_rank == 0:
        assert torch.equal(received["images"], torch.ones(3, width))
        communicator.send_forward({"language": torch.full((length, 2, width), 2.0)})
    else:
        assert torch.equal(received["language"], torch.full((length, 2, width), 2.0))
    return names
