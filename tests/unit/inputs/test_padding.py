"""How a run pads its texts: what parallel ranks need, and what losses of routers do."""

import numpy as np
import pytest

from data.order.load_balance import item_per_sample, routes_of
from data.order.packing import Packing, plan_in_packs
from data.order.step import StepBatch
from data.order.step_plan import plan_in_order
from mimo_train.config.compose import load
from mimo_train.estimate.flops import StepFlops
from mimo_train.inputs.padding import padding_of
from mimo_train.layout.batch import pack_length
from mimo_train.layout.run import config_faults, resolve
from mimo_train.logging.throughput import imbalance

LAYOUT, LLM = "modules.language.layout", "modules.language.llm"
EXPERTS = "llm@modules.language.llm=gpt_tiny_moe"


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ((), 8),
        ((f"{LAYOUT}.tp=4",), 8),
        ((f"{LAYOUT}.tp=4", f"{LAYOUT}.sp=true"), 8),
        ((f"{LAYOUT}.tp=3", f"{LAYOUT}.sp=true"), 24),
        ((f"{LAYOUT}.cp=8",), 16),
        ((f"{LAYOUT}.cp=3", f"{LAYOUT}.tp=2", f"{LAYOUT}.sp=true"), 24),
    ],
)
def test_rows_are_multiples_of_what_is_split(changes, unit):
    padding = padding_of(load("gpt_tiny", changes))
    assert padding is not None and padding.unit == unit and not padding.equal


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ((), True),
        ((f"{LLM}.router_balancing=global_aux_loss", f"{LAYOUT}.tp=4", f"{LAYOUT}.sp=true", f"{LAYOUT}.cp=2"), True),
        ((f"{LLM}.router_aux_loss=0",), False),
        ((f"{LLM}.router_balancing=none",), False),
        ((f"{LLM}.router_balancing=none", f"{LLM}.router_z_loss=0.01"), True),
    ],
)
def test_rows_that_losses_of_routers_are_means_over_are_as_long_at_any_layout(changes, equal):
    padding = padding_of(load("gpt_tiny", (EXPERTS, *changes)))
    assert padding is not None and (padding.equal, padding.unit) == (equal, 64 if equal else 8)


def test_rows_of_the_sequence_length_are_made_of_samples_in_their_order():
    assert padding_of(load("gpt_tiny", ("data.pad=sequence",))) is None


MOE = "llm@modules.language.llm=gpt_tiny_moe"
AUX = "modules.language.llm.router_balancing=aux_loss"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("data.pack=true",), ""),
        (("data.pack=true", "data.pack_length=64"), ""),
        (("data.pack_length=128",), "data.pack_length"),
        (("data.pack=true", "data.pack_length=63"), "data.pack_length"),
        (("data.pack=true", "data.pad=sequence"), "data.pad"),
        (("data.pack=true", MOE), "modules.language.llm.router_balancing"),
        (("data.pack=true", MOE, AUX), ""),
        (("data.pack=true", MOE, "modules.language.llm.router_aux_loss=0"), ""),
        (("data.pack=true", MOE, AUX.replace("aux_loss", "global_aux_loss")), "modules.language.llm.router_balancing"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_its_key(overrides, key):
    cfg = load("gpt_tiny", ("layout=language_one", "data.sequence_length=64", *overrides))
    assert [fault.key for fault in config_faults(cfg)] == ([key] if key else [])


def test_rows_are_what_the_layout_can_divide():
    sizes = ("data.pack=true", "train.micro_batch_size=2", "data.sequence_length=96", "train.global_batch_size=16")
    one = load("gpt_tiny", ("layout=language_one", *sizes))
    pair = padding_of(one).pair
    assert padding_of(one) == Packing(pack_length(one), 8, 1, pair=pair) and pack_length(one) == 192
    axes = {"cp": 3, "tp": 2, "sp": "true", "pp": 2, "vpp": 2}
    cut = load(
        "gpt_tiny", ("layout=language_one", *sizes, *(f"modules.language.layout.{a}={n}" for a, n in axes.items()))
    )
    packing = padding_of(cut)
    assert packing == Packing(192, 24, 2, pair=pair)
    assert packing.row_length(97) % (2 * 3 * 2) == 0 and len(plan_of([60] * 5, 1, packing).shares) % 2 == 0


def test_the_weight_of_attention_is_that_of_the_model_by_hand():
    sizes = ("hidden_size=16", "num_attention_heads=4", "num_query_groups=2", "ffn_hidden_size=24", "activation=swiglu")
    cfg = load("gpt_tiny", ("data.pack=true", "data.sequence_length=99", *(f"modules.language.llm.{x}" for x in sizes)))
    # Products of a token in a layer: qkv 16 * (16 + 8 + 8), output 16 * 16, up 16 * 48, down 24 * 16; 2 FLOPs each.
    # Attention: 4 * 16 for each of 99 * 100 / 2 pairs, of 99^2.
    weights = 16 * 32 + 16 * 16 + 16 * 48 + 24 * 16
    assert padding_of(cfg).pair == pytest.approx(4 * 16 * (100 / 99 / 2) / (2 * weights))


def plan_of(lengths: list[int], replicas: int, packing: Packing):
    return plan_in_packs(0, np.array(lengths), replicas, packing)


def test_flops_of_a_row_are_those_of_its_samples_and_of_the_padding_behind_them():
    cfg = load("gpt_tiny", ("layout=language_one", "data.sequence_length=64"))
    flops = StepFlops(cfg, 320)
    plan = plan_of([60, 30, 30, 7], 1, Packing(128))
    assert plan.texts_of_length == {60: 1, 30: 2, 7: 1, 1: 1} and plan.positions == 128
    nothing = {"counts": {}, "loads": {}, "pairs": {}}
    packed = flops(texts=plan.texts_of_length, **nothing, step=1)["language"].model
    # What has weights costs the same in one row; attention is less than across the whole of it.
    pairs = sum(n * (n + 1) / 2 for n in (60, 30, 30, 7, 1))
    row = flops(texts={128: 1}, **nothing, step=1)["language"].model
    each = 3 * 4 * cfg.llm.layer(0).mixer.query_width * cfg.llm.num_layers
    assert row - packed == pytest.approx(each * (128 * 129 / 2 - pairs))


def test_imbalance_is_the_busiest_rank_s_work_over_the_mean():
    overrides = ("layout=images_dp2_language_dp2", "train.micro_batch_size=1", "train.global_batch_size=4")
    layout = resolve(load("vlm_digits", overrides)).layout
    assert {name: module.dp for name, module in layout.modules.items()} == {"images": 2, "language": 2}
    plan = plan_in_order(0, 4, 2, 2, 10)
    batch = StepBatch(plan, [], [], {}, {}, {}, np.zeros(4, bool), {})
    of_passes = routes_of(item_per_sample(np.array([6, 0, 2, 0])), plan, 2, by_items=False)

    def routes(_module, microbatch):
        return of_passes[microbatch]

    def tokens(texts):
        return float(sum(length * number for length, number in texts.items()))

    assert imbalance(batch, layout, tokens, routes) == {
        "imbalance/images": 2.0,
        **{f"imbalance{what}/language": 1.0 for what in ("", "_tokens", "_attention")},
    }
    packed = plan_of([30, 10], 2, Packing(64, 1))
    uneven = StepBatch(packed, [], [], {}, {}, {}, np.zeros(2, bool), {})
    of_passes = routes_of(item_per_sample(np.array([0, 0])), packed, 2, by_items=False)
    longest = imbalance(uneven, layout, lambda texts: float(max(texts)), routes)
    # Rows of 32: 30 tokens and 2 of padding, 10 and 22.
    assert longest == {
        "imbalance/language": pytest.approx(30 * 2 / (30 + 22)),
        "imbalance_tokens/language": 1.0,
        "imbalance_attention/language": pytest.approx((30**2 + 2**2) * 2 / (30**2 + 2**2 + 10**2 + 22**2)),
    }
