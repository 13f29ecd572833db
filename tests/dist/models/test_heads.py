"""A GPT with a value head, trained through the loop's step by a forward step of a user's; frozen routers."""

from functools import partial

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

LAYOUTS = {
    "tp2": ("layout=language_tp2",),
    "tp2, sequence parallel": ("layout=language_tp2", "modules.language.layout.sp=true"),
    "pp2": ("layout=language_pp2",),
    "pp2, interleaved": ("layout=language_pp2_vpp2", "modules.language.llm.num_layers=4"),
    "dp2": ("layout=language_dp2", "train.micro_batch_size=4"),
    "cp2": ("layout=language_cp2",),
}


def value_loss(labels, loss_mask, values):
    """Squared error of a value for each token, summed: the target is a number that the next token stands for."""
    import torch

    assert values.shape == (*labels.shape, 1) and values.dtype == torch.float32
    target = (labels % 7).float() / 7
    mask = loss_mask.float()
    loss = ((values[..., 0] - target).square() * mask).sum()
    return loss, mask.sum().to(torch.int), {"value loss": torch.stack([loss.detach(), mask.sum()])}


def value_step(state, data_iterator, model):
    """A user's forward step: without labels the model gives its head's output."""
    from megatron.core.utils import unwrap_model

    from mimo_train.parallel.context import own_part

    batch = own_part(next(data_iterator), unwrap_model(model).pg_collection.cp)
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=None)
    return output, partial(value_loss, batch["labels"], batch["loss_mask"])


def value_run(cfg) -> Steps:
    """A run of a model with a value head."""
    from mimo_train.models.heads import make_value_model

    return Steps(cfg, value_step, pre_wrap_hook=make_value_model(32, cfg.language.layout.sp))


def _values(cfg, steps: int = 8) -> list[tuple]:
    return value_run(cfg).train(steps)


def gpt(prose, run_dir, *overrides: str):
    """At a rate at which squared errors fall: at that of the other runs they jump, and so do differences."""
    return config("gpt_tiny", run_dir, prose, "train.iters=20", "optim.lr=0.03", *overrides)


@pytest.fixture(scope="module")
def one_process(prose, tmp_path_factory) -> dict[int, list[tuple]]:
    """Curves of the value model on one process, by number of layers."""
    return {
        layers: whole(
            run_ranks(
                _values,
                1,
                gpt(
                    prose,
                    tmp_path_factory.mktemp("one"),
                    "layout=language_one",
                    f"modules.language.llm.num_layers={layers}",
                ),
            )
        )
        for layers in (2, 4)
    }


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_value_model_trains_to_the_numbers_of_one_process(overrides, one_process, prose, tmp_path):
    cfg = gpt(prose, tmp_path, *overrides)
    curve, one = whole(run_ranks(_values, 2, cfg)), one_process[cfg.language.llm.num_layers]
    assert max(largest_difference(one, curve)) < TOLERANCE
    assert one[-1][1] < one[0][1] * 0.9, "the value model does not learn, so that parity would say nothing"


def _heads(cfg) -> tuple[list[str], bool]:
    """Names of this rank's parameters with `output_layer` in them, and whether the embedding is marked as shared."""
    run = value_run(cfg)
    names = [name for name in run.parameters() if "output_layer" in name]
    shared = [
        bool(getattr(parameter, "shared_embedding", False))
        for chunk in run.model
        for name, parameter in chunk.named_parameters()
        if "word_embeddings" in name
    ]
    return names, any(shared)


def test_only_the_last_stage_has_the_head_and_no_weights_are_shared(prose, tmp_path):
    head = "language.0.module.output_layer.weight"
    assert run_ranks(_heads, 2, gpt(prose, tmp_path, "layout=language_pp2")) == [([], False), ([head], False)]
    interleaved = gpt(prose, tmp_path, *LAYOUTS["pp2, interleaved"])
    head = "language.1.module.output_layer.weight"
    assert run_ranks(_heads, 2, interleaved) == [([], False), ([head], False)]


def _train_and_save(cfg) -> None:
    run = value_run(cfg)
    run.train(3)
    run.save()


def _export(run_dir, to) -> None:
    from tests.dist.commands import command

    code, output = command(["export", str(run_dir), "--to", str(to)])
    assert code == 0, output


@pytest.mark.parametrize("layouts", [("tp2, sequence parallel", "pp2"), ("pp2", "tp2")])
def test_a_value_model_is_saved_and_resumed_at_another_layout(layouts, one_process, prose, tmp_path):
    first, then = (gpt(prose, tmp_path, *LAYOUTS[layout]) for layout in layouts)
    run_ranks(_train_and_save, 2, first)
    resumed = [(step + 3, loss, norm) for step, loss, norm in whole(run_ranks(_values, 2, then, 5))]
    assert max(largest_difference(one_process[2][3:], resumed)) < TOLERANCE
    if layouts[0] == "pp2":  # its head has no place in an export
        with pytest.raises(AssertionError, match="language output_layer.weight"):
            run_ranks(_export, 1, tmp_path, tmp_path / "exported")


def _router_changes(cfg) -> dict[str, float]:
    """Largest change of each parameter over 3 steps of a mixture of experts with frozen routers."""
    from mimo_train.models.heads import freeze_moe_router

    run = Steps(cfg, pre_wrap_hook=freeze_moe_router)
    before = run.parameters()
    run.train(3)
    after = run.parameters()
    return {name: float((after[name] - before[name]).abs().max()) for name in before}


def test_frozen_routers_do_not_move_and_experts_do(prose, tmp_path):
    experts = (
        "llm@modules.language.llm=gpt_tiny_moe",
        "modules.language.llm.shared_expert_ffn_hidden_size=32",
        "modules.language.llm.shared_expert_gate=true",
    )
    changes = run_ranks(_router_changes, 1, gpt(prose, tmp_path, "layout=language_one", *experts))[0]
    still = {name for name, change in changes.items() if change == 0}
    assert still == {name for name in changes if name.endswith(("router.weight", "gate_weight"))}
    assert {name.rpartition(".")[2] for name in still} == {"weight", "gate_weight"}
