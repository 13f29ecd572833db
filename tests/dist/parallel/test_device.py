"""The CPU stand-in, and every other adaptation of Megatron-Core: each test fails when its adaptation is not needed."""

import inspect
import os

import pytest

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks


def on_one_rank(function):
    """Runs `function` in a forked process, since the stand-in changes its process."""
    return run_ranks(function, 1)[0]


def _names_of_cuda() -> list[str]:
    import torch

    from mimo_train.parallel import device

    device.install("cpu")
    tensor = torch.zeros(2, device="cuda")
    made = [
        tensor,
        torch.ones(2, device="cuda:0"),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        tensor.cuda(),
        tensor.to("cuda"),
        torch.zeros_like(tensor, device="cuda"),
        tensor.new_zeros(2, device="cuda"),
        tensor.to(device="cuda", dtype=torch.float64),
        torch.zeros(2, pin_memory=True),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    with torch.device("meta"):
        assert torch.zeros(2).is_meta, "torch's own device contexts hold"
    assert torch._C._len_torch_function_stack() == 0, "a mode costs every call of torch"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3)) and event.query()
    return [str(item.device) for item in made] + [tensor.type(), tensor.long().type()]


def test_cuda_names_mean_the_cpu():
    *devices, float_type, long_type = on_one_rank(_names_of_cuda)
    assert set(devices) == {"cpu"}
    assert (float_type, long_type) == ("torch.cuda.FloatTensor", "torch.cuda.LongTensor")


def _rules_of_dynamo() -> int:
    """How many functions torch.compile knows, asked for the first time behind the stand-in."""
    from torch._dynamo import trace_rules

    from mimo_train.parallel import device

    device.install("cpu")
    trace_rules.get_torch_obj_rule_map.cache_clear()
    return len(trace_rules.get_torch_obj_rule_map())


def test_megatron_core_can_be_imported_behind_the_stand_in():
    """Its import asks torch.compile for these rules, which want each function of torch to be another."""
    assert on_one_rank(_rules_of_dynamo) > 1000


def _call_without_stand_in() -> str:
    import torch

    from mimo_train.cpu import backend
    from mimo_train.parallel import device

    device.install("cpu")
    try:
        torch.cuda.mem_get_info()
    except backend.UnsupportedCudaCall as error:
        return str(error)
    return "no error"


def test_cuda_call_without_stand_in_is_named_with_its_caller():
    message = on_one_rank(_call_without_stand_in)
    assert "torch.cuda.mem_get_info" in message and "test_device.py" in message


def _choose(requested: str) -> str:
    from mimo_train.parallel import device

    try:
        return device.choose(requested).kind
    except ValueError as error:
        return str(error)


def test_cuda_where_there_is_none_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _choose("auto") == "cpu"
    assert "run.device" in _choose("cuda") and "no CUDA device" in _choose("cuda")


def _with_devices(monkeypatch, number: int, visible: str = "", torchrun: bool = True):
    """`device.choose` on a machine with so many devices."""
    from mimo_train.parallel import device

    monkeypatch.setattr("torch.cuda.is_available", lambda: number > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: number)
    for name, value in {"CUDA_VISIBLE_DEVICES": visible, "TORCHELASTIC_RUN_ID": "1" if torchrun else ""}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    return device.choose


def test_each_process_takes_the_device_of_its_number(monkeypatch):
    choose = _with_devices(monkeypatch, 4)
    assert [(one.kind, one.index) for one in (choose("auto", 4, rank) for rank in range(4))] == [
        ("cuda", 0), ("cuda", 1), ("cuda", 2), ("cuda", 3)
    ]  # fmt: skip


def test_fewer_cuda_devices_than_processes_is_a_clear_error(monkeypatch):
    choose = _with_devices(monkeypatch, 1, visible="0")
    assert choose("auto", 1).kind == "cuda"
    with pytest.raises(ValueError, match="2 processes on this machine have 1 CUDA device: .*or cpu"):
        choose("cuda", 2)


def test_auto_says_why_it_is_the_cpu_where_there_is_a_device(monkeypatch):
    chosen = _with_devices(monkeypatch, 1)("auto", 2, 1)
    assert chosen.kind == "cpu"
    assert chosen.remark.startswith("run.device=auto: on the CPU, since 2 processes on this machine have 1 CUDA device")
    assert not _with_devices(monkeypatch, 0)("auto", 2).remark, "nothing to say where there is none"
    assert not _with_devices(monkeypatch, 1)("cpu", 2).remark, "nor where it was asked for"


def test_a_process_that_was_given_one_device_takes_it_whatever_its_number(monkeypatch):
    """SLURM's --gpus-per-task: each process sees its own device, as number 0."""
    choose = _with_devices(monkeypatch, 1, visible="3", torchrun=False)
    for requested in ("auto", "cuda"):
        assert (choose(requested, 8, 5).kind, choose(requested, 8, 5).index) == ("cuda", 0)


def _said_at_the_start(cfg) -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    import torch

    from mimo_train.training.step.pipeline import start_processes

    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with redirect_stdout(StringIO()) as said:
        kind, _ = start_processes(cfg)
    assert kind == "cpu"
    return said.getvalue()


def test_a_run_says_once_why_it_is_on_the_cpu():
    cfg = load("vlm_digits", ("layout=two_processes",))
    first, second = run_ranks(_said_at_the_start, 2, cfg)
    assert "run.device=auto: on the CPU" in first and second == ""


def test_what_the_environment_costs_a_cuda_run_is_said(monkeypatch):
    from mimo_train.parallel import device

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    connections, allocator = device.remarks(True)
    assert connections.startswith("CUDA_DEVICE_MAX_CONNECTIONS is not set")
    assert allocator.startswith("PYTORCH_ALLOC_CONF is not set") and "expandable_segments:True" in allocator
    assert list(device.remarks(False)) == [allocator]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert [each.partition(":")[0] for each in device.remarks(True)] == ["CUDA_DEVICE_MAX_CONNECTIONS is 8"]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    assert not list(device.remarks(True))


def test_host_copies_go_from_pinned_memory(monkeypatch):
    """A copy to a CUDA device from other memory lets the host wait for all that is queued."""
    import torch

    from mimo_train.parallel import device

    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: copies.append("pinned") or self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking=False: copies.append((device.type, non_blocking)) or self
    )
    device.to_device({"tokens": [torch.zeros(2)]}, torch.device("cuda", 0))
    device.tensor([1.0], torch.float64, torch.device("cuda", 0))
    assert copies == ["pinned", ("cuda", True)] * 2


def test_stages_do_not_wait_for_the_device_after_each_message():
    """Needed no longer where Megatron-Core's default is False."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    from mimo_train.models.transformer_config import language_config

    cfg = load("gpt_tiny")
    assert ModelParallelConfig().batch_p2p_sync and not language_config(cfg, resolve(cfg).layout).batch_p2p_sync


def _without_our_adam() -> str:
    import torch

    from mimo_train.parallel import device

    device.install("cpu")
    device.init_process_group("cpu", 1)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from mimo_train.parallel.groups import build_groups

    groups = build_groups(resolve(load("gpt_tiny")).layout).collections["language"]
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, torch.nn.Linear(4, 4), pg_collection=groups)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True),
        [model],
        pg_collection=groups,
        use_gloo_process_groups=False,
    )
    try:
        optimizer.chained_optimizers[0].state_dict()
    except AssertionError:
        return "fails"
    return "works"


def test_adam_is_needed_because_torch_adamw_fails_under_the_distributed_optimizer():
    assert on_one_rank(_without_our_adam) == "fails"


def test_norm_is_needed_because_the_wrapped_one_refuses_sequence_parallelism():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 4)


def test_bridge_is_needed_because_uneven_fan_in_and_unequal_sizes_are_refused():
    from megatron.core.models.mimo.model.base import MimoModel
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    assert "not supported yet" in inspect.getsource(MimoModel._attach_modality_split_sizes)
    assert "must be evenly divisible" in inspect.getsource(BridgeCommunicator.build_comm_map)


def _gather_unequal_parts() -> tuple[str, list]:
    """The error without the stand-in, and what it gathers of 1 row and 3 rows."""
    import torch
    import torch.distributed as dist

    from mimo_train.parallel import device

    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), (1, 3)
    own = torch.full((rows[rank], 2), float(rank + 1))

    def gather() -> torch.Tensor:
        parts = [torch.zeros(count, 2) for count in rows]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    refused = ""
    try:
        gather()
    except RuntimeError as error:
        refused = str(error)
    dist.barrier()
    device.install("cpu")
    return refused, gather().tolist()


def test_unequal_parts_are_needed_because_gloo_takes_equal_ones():
    for refused, gathered in run_ranks(_gather_unequal_parts, 2):
        assert "invalid tensor size" in refused
        assert gathered == [[1.0, 1.0]] + [[2.0, 2.0]] * 3


def _send_both_ways(apart: bool) -> list[float]:
    """What a stage of two receives when both send an activation and a gradient at once: [activation, gradient]."""
    import torch
    import torch.distributed as dist
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from mimo_train.parallel import device

    device.install("cpu")
    dist.init_process_group("gloo")
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_comm=not apart, overlap_p2p_comm=apart)
    communicator = P2PCommunicator(dist.new_group([0, 1]), config)
    activation, gradient, shape = torch.full((2,), 1.0), torch.full((2,), -1.0), (2,)
    if not apart:
        received = communicator.send_forward_backward_recv_forward_backward(
            activation, gradient, recv_prev=True, recv_next=True, tensor_shape=shape
        )
        return [tensor[0].item() for tensor in received]
    forward, handles = communicator.send_forward_recv_forward(
        activation, recv_prev=True, tensor_shape=shape, overlap_p2p_comm=True
    )
    backward, more = communicator.send_backward_recv_backward(
        gradient, recv_next=True, tensor_shape=shape, overlap_p2p_comm=True
    )
    for handle in (*handles.values(), *more.values()):
        handle.wait()
    return [forward[0].item(), backward[0].item()]


def test_sending_apart_is_needed_because_two_stages_mistake_gradients_for_activations():
    assert run_ranks(_send_both_ways, 2, False) == [[-1.0, 1.0]] * 2
    assert run_ranks(_send_both_ways, 2, True) == [[1.0, -1.0]] * 2
