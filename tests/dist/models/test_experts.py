"""Experts: weights that no layout changes, and a load-balancing loss with the weight that the config says."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.dist.steps import Steps

EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=16",
    "modules.language.llm.shared_expert_ffn_hidden_size=16",
    "modules.language.llm.tie_embeddings=false",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
)
TENSOR_PARALLEL = ("layout=language_tp2", "modules.language.layout.sp=true")
LAYOUTS = {
    "ep2": ("layout=language_ep2",),
    "etp2": (*TENSOR_PARALLEL, "modules.language.layout.etp=2"),
    "ep2 of tp2": (*TENSOR_PARALLEL, "modules.language.layout.ep=2"),
    "pp2": ("layout=language_pp2",),
}


def build(cfg):
    """This rank's pipeline and model chunks, with their initial weights."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mimo_train.models.build import build_model
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups
    from mimo_train.training.step.pipeline import Pipeline

    device = devices.install("cpu")
    devices.init_process_group("cpu", 1.0)
    run = resolve(cfg)
    groups = build_groups(run.layout)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
    model = build_model(cfg, run.layout, groups, vocab_size=260, special_token_ids={}, device=device, te=False)
    return Pipeline(run, groups, model, device), model


def initial_weights(cfg) -> dict[str, list]:
    """The weights of this rank by their names in the whole model, as (sum, sum of squares, elements)."""
    from mimo_train.models.parameters import global_names

    _, model = build(cfg)
    found = {}
    for chunk in model:
        for name, weight in global_names(chunk).items():
            values = weight.double()
            found[name] = [values.sum().item(), values.pow(2).sum().item(), weight.numel()]
    return found


def whole_weights(cfg, ranks: int) -> dict[str, tuple]:
    """Weights of all ranks together: parts of one are added, copies are not."""
    parts: dict[str, list] = {}
    for rank in run_ranks(initial_weights, ranks, cfg):
        for name, part in rank.items():
            if part not in parts.setdefault(name, []):
                parts[name].append(part)
    return {name: tuple(map(math.fsum, zip(*found, strict=True))) for name, found in parts.items()}


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_initial_weights_are_those_of_one_process(overrides, tmp_path):
    one = whole_weights(config("gpt_tiny", tmp_path, tmp_path, "layout=language_one", *EXPERTS), 1)
    assert sum("experts.3." in name for name in one) == 2 * 2, "two matrices of the last expert in each of two layers"
    assert len({values for name, values in one.items() if "linear_fc1" in name}) == 2 * (4 + 1), "no two are equal"
    two = whole_weights(config("gpt_tiny", tmp_path, tmp_path, *overrides, *EXPERTS), 2)
    assert two.keys() == one.keys()
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


def test_grouped_experts_get_the_weights_of_single_ones(tmp_path):
    cfg = config("gpt_tiny", tmp_path, tmp_path, "layout=language_one", *EXPERTS)
    assert run_ranks(compare_grouped_experts, 1, cfg) == [4]


def compare_grouped_experts(cfg) -> int:
    """Number of experts whose weights are the same in grouped layers, as Transformer Engine has them."""
    import torch
    from torch.nn import Parameter

    from mimo_train.models.blocks.experts.module import _seeded_experts

    pipeline, (chunk,) = build(cfg)
    single = chunk.module.decoder.layers[0].mlp.experts
    up, down = (
        [getattr(expert, name).weight for expert in single.local_experts] for name in ("linear_fc1", "linear_fc2")
    )

    def grouped(count, config, **_):
        assert not config.perform_initialization
        layers = [torch.nn.Module(), torch.nn.Module()]
        for layer, weights in zip(layers, (up, down), strict=True):
            for index in range(count):
                layer.register_parameter(f"weight{index}", Parameter(torch.full_like(weights[index], math.nan)))
        return SimpleNamespace(linear_fc1=layers[0], linear_fc2=layers[1])

    from mimo_train.models.parameters import seed_for

    torch.manual_seed(seed_for(chunk.config.init_seed, "layer", 1))
    experts = _seeded_experts(
        grouped, len(up), chunk.config, pg_collection=pipeline.groups.collections["language"], name="experts"
    )
    return sum(
        torch.equal(getattr(experts.linear_fc1, f"weight{index}"), up[index])
        and torch.equal(getattr(experts.linear_fc2, f"weight{index}"), down[index])
        for index in range(len(up))
    )


@pytest.mark.parametrize(
    ("weights", "learned"),
    [((0.5, 0.0), 4), ((0.0, 0.5), 4), ((0.5, 0.5), 1)],
    ids=["balancing, a quarter of the positions count", "z-loss, a quarter of the positions count", "both, all count"],
)
def test_losses_of_routers_are_means_with_the_weights_of_the_config(learned, weights, tmp_path):
    """Gradients of a step equal those of (mean token loss + weight x mean balancing loss over sequences + weight x
    mean z-loss over tokens), written out. Half of the rows are padded to the double."""
    names = ("router_aux_loss", "router_z_loss")
    keys = [f"modules.language.llm.{name}={weight}" for name, weight in zip(names, weights, strict=True)]
    cfg = config("gpt_tiny", tmp_path, tmp_path, "layout=language_one", *EXPERTS, *keys)
    (result,) = run_ranks(compare_gradients, 1, cfg, learned)
    logged = [name for name, weight in zip(("load_balancing_loss", "z_loss"), weights, strict=True) if weight]
    assert list(result["values"]) == logged
    for name in logged:
        assert result["values"][name] == pytest.approx(result["expected"][name], rel=1e-5)
    assert result["largest"] > 1e-3
    assert result["difference"] < 1e-5 * result["largest"], json.dumps(result)


def compare_gradients(cfg, learned: int) -> dict[str, Any]:
    """Gradients of the routers by the pipeline, and by autograd of the formula."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from mimo_train.models.language_model import leave_out
    from mimo_train.training.step.forward_step import record_losses
    from mimo_train.training.step.losses import StepLosses, divide_gradients
    from mimo_train.training.tasks.sft import masked_token_loss
    from mimo_train.training.train_step import reduce_metrics

    pipeline, model = build(cfg)
    (chunk,), llm, length = model, cfg.language.llm, cfg.data.sequence_length
    torch.manual_seed(5)
    batches = []
    for _ in range(pipeline.batch.num_microbatches):
        ids = torch.randint(0, 250, (cfg.train.micro_batch_size, length + 1))
        padding = torch.arange(length) >= torch.tensor([length, length // 2] * (len(ids) // 2))[:, None]
        mask = (torch.arange(length) % learned == 0) * ~padding
        batches.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask.float(), "padding": padding})
    positions = torch.arange(length)[None]
    tokens = sum(batch["loss_mask"].sum() for batch in batches)
    valid = sum((~batch["padding"]).sum() for batch in batches)

    def losses(batch):
        return chunk(input_ids=batch["input_ids"], position_ids=positions, attention_mask=None, labels=batch["labels"])

    def step(iterator, _model):
        batch = next(iterator)
        leave_out(chunk, batch["padding"])
        return losses(batch), lambda output: masked_token_loss(batch["loss_mask"], output)

    pipeline.router_losses.weigh(tokens, valid, len(batches) * cfg.train.micro_batch_size * length)
    chunk.zero_grad_buffer()
    losses_of_step = StepLosses({}, pipeline.groups)
    pipeline.run(record_losses(step, losses_of_step), iter(batches))
    reduced = reduce_metrics({"tokens": (1, losses_of_step.local_tokens())}, pipeline.device)["tokens"]
    assert reduced == tokens
    divide_gradients(pipeline.chunks, reduced)
    losses_of_routers = pipeline.router_losses
    values = {name: value.item() for name, value in losses_of_routers.reduced(losses_of_routers.local_sums()).items()}
    routers = [layer.mlp.router.weight for layer in chunk.module.decoder.layers]
    by_pipeline = [weight.main_grad.clone() for weight in routers]

    MoEAuxLossAutoScaler.set_loss_scale(torch.zeros(1))
    logits: list[torch.Tensor] = []
    for layer in chunk.module.decoder.layers:
        original = layer.mlp.router.gating
        layer.mlp.router.gating = lambda given, original=original: logits.append(original(given)) or logits[-1]
    token_loss, balancing, z_losses = 0.0, [], []
    for batch in batches:
        token_loss = token_loss + (losses(batch) * batch["loss_mask"]).sum()
    for call, layer_SBE in enumerate(logits):
        padding_BS = batches[call // llm.num_layers]["padding"]
        z_losses.append((layer_SBE.float().logsumexp(dim=-1).square() * ~padding_BS.T).sum() / valid)
        for sequence_SE, padding_S in zip(layer_SBE.unbind(dim=1), padding_BS, strict=True):
            scores = sequence_SE[~padding_S].float().softmax(dim=-1)
            picked = torch.zeros_like(scores).scatter(1, scores.topk(llm.experts_per_token).indices, 1)
            fractions = picked.sum(0) / (llm.experts_per_token * len(scores))
            balancing.append(llm.num_experts * (fractions * scores.mean(0)).sum())
    assert len(balancing) == llm.num_layers * cfg.train.global_batch_size
    mean_over_sequences = torch.stack(balancing).sum() / cfg.train.global_batch_size
    mean_over_tokens = torch.stack(z_losses).sum()
    total = token_loss / tokens + llm.router_aux_loss * mean_over_sequences + llm.router_z_loss * mean_over_tokens
    chunk.zero_grad_buffer()
    total.backward()
    differences = [(ours - weight.main_grad).abs().max() for ours, weight in zip(by_pipeline, routers, strict=True)]
    return {
        "values": values,
        "expected": {
            "load_balancing_loss": torch.stack(balancing).mean().item(),
            "z_loss": torch.stack(z_losses).sum().item() / llm.num_layers,
        },
        "difference": max(differences).item(),
        "largest": max(weight.main_grad.abs().max() for weight in routers).item(),
    }


LOSSES_OF_ROUTERS = ("modules.language.llm.router_z_loss=0.01", "log.metrics=[router_losses_per_layer]")
NAMES = ("load_balancing_loss", "z_loss")


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_of_routers_are_the_same_on_every_rank_at_every_layout(overrides, prose, tmp_path):
    one, two = (
        run_ranks(
            values_of_routers, ranks, config("gpt_tiny", tmp_path / name, prose, *layout, *EXPERTS, *LOSSES_OF_ROUTERS)
        )
        for name, ranks, layout in (("one", 1, ("layout=language_one",)), ("two", 2, overrides))
    )
    for step in one[0]:
        assert len(step) == 2 * (1 + 2), "both losses, their means and those of two layers"
        for name in NAMES:
            layers = [step[f"moe/{name}_layer_{number}"] for number in (0, 1)]
            assert step[name] == pytest.approx(sum(layers) / 2) and layers[0] != layers[1]
        assert 0.9 < step["load_balancing_loss"] < 4 and 0 < step["z_loss"]
    for rank in two:
        assert rank == [pytest.approx(step, rel=TOLERANCE) for step in one[0]]


def values_of_routers(cfg) -> list[dict[str, float]]:
    """The losses of routers of two steps, as every rank knows them."""
    import torch
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from mimo_train.training import train_step

    # What an earlier run of this process has left, of a model with more layers.
    get_moe_metrics_tracker().record("z_loss", torch.tensor(1e6), 1, num_layers=7)
    cfg.train.iters, values, sums = 2, [], {}
    steps, reduce_metrics = Steps(cfg), train_step.reduce_metrics
    train_step.reduce_metrics = lambda parts, device: sums.update(reduce_metrics(parts, device)) or sums
    for _ in range(2):
        steps.train(1)
        reduced = steps.pipeline.router_losses.reduced(sums["router losses"])
        values.append({name: value.item() for name, value in reduced.items()})
    return values


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss", "none"])
def test_losses_of_routers_weigh_alike_at_every_number_of_ranks(kind, prose, tmp_path):
    weights = [f"modules.language.llm.{name}=0.5" for name in ("router_aux_loss", "router_z_loss")]

    def trained(name: str, *layout: str) -> list[tuple]:
        overrides = (*EXPERTS, f"modules.language.llm.router_balancing={kind}", *weights, *layout, "train.iters=3")
        return curve(train_on_ranks(config("gpt_tiny", tmp_path / name, prose, *overrides)))

    one = trained("one", "layout=language_one", "train.micro_batch_size=8")
    two = trained("two", "layout=language_dp2", "train.micro_batch_size=4")
    loss, norm = largest_difference(one, two)
    assert loss < TOLERANCE and norm < TOLERANCE


def test_losses_of_routers_of_every_layer_reach_the_sinks_of_a_run_of_several_modules(digits, tmp_path):
    overrides = ("layout=two_processes", *EXPERTS, *LOSSES_OF_ROUTERS, "train.iters=2", "log.tensorboard=true")
    lines = train_on_ranks(config("vlm_digits", tmp_path, digits, *overrides))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in (*NAMES, *(f"moe/{name}_layer_{number}" for name in NAMES for number in (0, 1))):
        values = [line[name] for line in lines if "lm loss" in line]
        assert len(values) == 2 and all(values)
        assert [event.value for event in events.Scalars(name)] == pytest.approx(values)
