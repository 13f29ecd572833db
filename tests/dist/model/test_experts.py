"""Experts: weights that no layout changes, and a load-balancing loss with the weight that the config says."""

import json
import math
from types import SimpleNamespace

import pytest

from mimo_train.plan.run import resolve
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

    from mimo_train.model.build import build_model
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups
    from mimo_train.parallel.step_sum import StepSum
    from mimo_train.step.schedule import Pipeline

    device = devices.install("cpu")
    devices.init_process_group("cpu", 1.0, device)
    run = resolve(cfg)
    groups = build_groups(run.layout)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
    model = build_model(cfg, run.layout, groups, vocab_size=260, special_token_ids={}, device=device, te=False)
    step_sum = StepSum(device)
    pipeline = Pipeline(run, groups, model, device, step_sum)
    step_sum.open("tokens", 1, pipeline.own_tokens)
    return pipeline, model


def initial_weights(cfg) -> dict[str, list]:
    """The weights of this rank by their names in the whole model, as (sum, sum of squares, elements)."""
    from mimo_train.model.names import global_names

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

    from mimo_train.model.moe import _seeded_experts

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

    from mimo_train.model.seeds import seed_for

    torch.manual_seed(seed_for(chunk.config.init_seed, "layer", 1))
    experts = _seeded_experts(
        grouped, len(up), chunk.config, pg_collection=pipeline.groups.collections["language"], name="experts"
    )
    return sum(
        torch.equal(getattr(experts.linear_fc1, f"weight{index}"), up[index])
        and torch.equal(getattr(experts.linear_fc2, f"weight{index}"), down[index])
        for index in range(len(up))
    )


@pytest.mark.parametrize("learned", [1, 4], ids=["all positions count", "a quarter of the positions count"])
def test_balancing_loss_is_the_mean_over_sequences_with_the_weight_of_the_config(learned, tmp_path):
    """Gradients of a step equal those of (mean token loss + weight x mean balancing loss), written out."""
    overrides = ("layout=language_one", *EXPERTS, "modules.language.llm.router_aux_loss=0.5")
    (result,) = run_ranks(compare_gradients, 1, config("gpt_tiny", tmp_path, tmp_path, *overrides), learned)
    assert result["value"] == pytest.approx(result["expected value"], rel=1e-5)
    assert result["largest"] > 1e-3
    assert result["difference"] < 1e-5 * result["largest"], json.dumps(result)


def compare_gradients(cfg, learned: int) -> dict[str, float]:
    """Gradients of the routers by the pipeline, and by autograd of the formula."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from mimo_train.step.losses import masked_token_loss

    pipeline, model = build(cfg)
    (chunk,), llm, length = model, cfg.language.llm, cfg.data.sequence_length
    torch.manual_seed(5)
    batches = []
    for _ in range(pipeline.batch.num_microbatches):
        ids = torch.randint(0, 250, (cfg.train.micro_batch_size, length + 1))
        mask = (torch.arange(length) % learned == 0).float().expand(len(ids), -1)
        batches.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask})
    positions = torch.arange(length)[None]

    def losses(batch):
        return chunk(input_ids=batch["input_ids"], position_ids=positions, attention_mask=None, labels=batch["labels"])

    def step(iterator, _model):
        batch = next(iterator)
        return losses(batch), lambda output: masked_token_loss(batch["loss_mask"], output)

    pipeline.balancing.learned_share = torch.tensor(1 / learned)
    chunk.zero_grad_buffer()
    pipeline.run(step, iter(batches))
    value = pipeline.balancing.reduced(pipeline.balancing.own().reshape(1))["load_balancing_loss"].item()
    routers = [layer.mlp.router.weight for layer in chunk.module.decoder.layers]
    by_pipeline = [weight.main_grad.clone() for weight in routers]

    MoEAuxLossAutoScaler.set_loss_scale(torch.zeros(1))
    logits: list[torch.Tensor] = []
    for layer in chunk.module.decoder.layers:
        original = layer.mlp.router.gating
        layer.mlp.router.gating = lambda given, original=original: logits.append(original(given)) or logits[-1]
    token_loss, balancing = 0.0, []
    for batch in batches:
        token_loss = token_loss + (losses(batch) * batch["loss_mask"]).sum()
    for layer_SBE in logits:
        for sequence_SE in layer_SBE.unbind(dim=1):
            scores = sequence_SE.float().softmax(dim=-1)
            picked = torch.zeros_like(scores).scatter(1, scores.topk(llm.experts_per_token).indices, 1)
            fractions = picked.sum(0) / (llm.experts_per_token * length)
            balancing.append(llm.num_experts * (fractions * scores.mean(0)).sum())
    assert len(balancing) == llm.num_layers * cfg.train.global_batch_size
    tokens = sum(batch["loss_mask"].sum() for batch in batches)
    mean_over_sequences = torch.stack(balancing).sum() / cfg.train.global_batch_size
    total = token_loss / tokens + llm.router_aux_loss * mean_over_sequences
    chunk.zero_grad_buffer()
    total.backward()
    differences = [(ours - weight.main_grad).abs().max() for ours, weight in zip(by_pipeline, routers, strict=True)]
    return {
        "value": value,
        "expected value": torch.stack(balancing).mean().item(),
        "difference": max(differences).item(),
        "largest": max(weight.main_grad.abs().max() for weight in routers).item(),
    }


@pytest.mark.parametrize("overrides", [("layout=language_ep2",), TENSOR_PARALLEL], ids=["ep2", "tp2"])
def test_balancing_loss_is_logged_alike_at_every_layout(overrides, prose, tmp_path):
    one, two = (
        run_ranks(values_of_balancing_loss, ranks, config("gpt_tiny", tmp_path / name, prose, *layout, *EXPERTS))
        for name, ranks, layout in (("one", 1, ("layout=language_one",)), ("two", 2, overrides))
    )
    assert all(0.9 < value < 4 for value in one[0]) and len(one[0]) == 2
    for rank in two:
        assert rank == pytest.approx(one[0], rel=TOLERANCE)


def test_balancing_over_all_ranks_weighs_alike_at_every_number_of_ranks(prose, tmp_path):
    balancing = ("modules.language.llm.router_balancing=global_aux_loss", "modules.language.llm.router_aux_loss=0.5")

    def trained(name: str, *layout: str) -> list[tuple]:
        overrides = (*EXPERTS, *balancing, *layout, "train.iters=3")
        return curve(train_on_ranks(config("gpt_tiny", tmp_path / name, prose, *overrides)))

    one = trained("one", "layout=language_one", "train.micro_batch_size=8")
    two = trained("two", "layout=language_dp2", "train.micro_batch_size=4")
    loss, norm = largest_difference(one, two)
    assert max(loss, norm) < TOLERANCE


def values_of_balancing_loss(cfg) -> list[float]:
    """The loss of two steps, as every rank knows it."""
    cfg.train.iters, values = 2, []
    steps = Steps(cfg)
    for _ in range(2):
        steps.train(1)
        balancing = steps.pipeline.balancing
        total = steps.session.parts.step_sum.total(balancing.NAME)
        values.append(balancing.reduced(total)["load_balancing_loss"].item())
    return values
