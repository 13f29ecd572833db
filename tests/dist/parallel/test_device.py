"""The CPU stand-in, and every other adaptation of Megatron-Core: each test fails when its adaptation is not needed."""

import inspect

import pytest

from mimo_train.plan.run import resolve
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

    from mimo_train.parallel import cuda_stand_in, device

    device.install("cpu")
    try:
        torch.cuda.mem_get_info()
    except cuda_stand_in.MissingStandIn as error:
        return str(error)
    return "no error"


def test_cuda_call_without_stand_in_is_named_with_its_caller():
    message = on_one_rank(_call_without_stand_in)
    assert "torch.cuda.mem_get_info" in message and "test_device.py" in message


def _resolve(requested: str) -> str:
    from mimo_train.parallel import device

    try:
        return device.resolve(requested)
    except ValueError as error:
        return str(error)


def test_cuda_where_there_is_none_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _resolve("auto") == "cpu"
    assert "run.device" in _resolve("cuda") and "no CUDA device" in _resolve("cuda")


def test_fewer_cuda_devices_than_processes_is_a_clear_error(monkeypatch):
    from mimo_train.parallel import device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert device.resolve("auto", 1) == "cuda" and device.resolve("auto", 2) == "cpu"
    with pytest.raises(ValueError, match="2 processes on this machine have 1 CUDA devices"):
        device.resolve("cuda", 2)


def _without_our_adam() -> str:
    import torch

    from mimo_train.parallel import device

    device.install("cpu")
    device.init_process_group("cpu", 1, device.CPU)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    from mimo_train.config.compose import load
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
