"""Proposals are legal, fit, and are the best in the model; their overrides select them."""

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_train.config.compose import RECIPES, from_dict, shipped_configs, to_dict
from mimo_train.config.compose import load as compose
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.transformers_llm import TransformersLlm
from mimo_train.estimate.devices import ATTENTION, DEVICES, MATMULS, Device, Links
from mimo_train.estimate.memory import rank_memory, stage_memory
from mimo_train.estimate.parameters import module_parameters, padded_vocab_size
from mimo_train.layout.run import resolve
from mimo_train.preflight.check import check
from mimo_train.preflight.plan.candidate import Candidate, FullestRank
from mimo_train.preflight.plan.costs import Costs
from mimo_train.preflight.plan.predict import Predictor, Stage, schedule_seconds
from mimo_train.preflight.plan.search import Request, plan, require_sound
from mimo_train.preflight.plan.space import Space
from tests.unit.configs import changed, load

FOLDER = shipped_configs() / RECIPES
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
ROWS = 384


def request(cfg, gpus: int, **changes) -> Request:
    vocab = padded_vocab_size(cfg.llm.vocab_size) if cfg.llm.vocab_size else ROWS
    values = {"node": 8, "device": DEVICES["h100"], "vocab": vocab, "media": dict.fromkeys(cfg.encoders, 1.0)}
    return Request(gpus, **values | changes)


def predictor(cfg, asked: Request, recomputes: Iterable[str] = ("none",)) -> Predictor:
    """Return the predictor of the search, for single candidates."""
    links = Links(asked.device, asked.node)
    cfgs = {each: replace(cfg, train=replace(cfg.train, recompute=each)) for each in recomputes}
    return Predictor(cfg, Costs(cfgs, asked.vocab, dict(asked.media), links), links)


def seconds_of(cfg, asked: Request, candidate: Candidate) -> float:
    return predictor(cfg, asked, ("none", candidate.recompute)).predict(candidate).seconds


def test_tensor_parallel_ranks_repeat_the_matmuls_of_muon():
    links = Links(DEVICES["h100"], 8)

    def update(name: str, **sizes: int) -> float:
        cfg = load("gpt_tiny")
        cfg.train.precision, cfg.optim.name = "bf16", name
        costs = Costs({"none": cfg}, ROWS, {}, links)
        (stage,) = costs.language(LayoutConfig(**sizes), 1, "none", offload=False, distributed_optimizer=True)
        return stage.update

    llm = load("gpt_tiny").llm
    elements = module_parameters(load("gpt_tiny"), "language", ROWS)["llm"].total - ROWS * llm.hidden_size
    whole = 5 * 6 * llm.hidden_size * elements / links.device.rate("bf16") / MATMULS
    assert update("muon") - update("adamw") == pytest.approx(whole)
    assert update("muon", tp=2) - update("adamw", tp=2) == pytest.approx(whole, rel=0.02)  # vectors are whole
    assert update("muon", dp=2) - update("adamw", dp=2) == pytest.approx(whole / 2)


SIZES = (8, 64, 512)
EVERY = list(product(NAMES, SIZES))
"""All cases passed. By default one size per recipe runs, with MIMO_ALL_LAYOUTS=1 all."""
DEFAULT = [(name, SIZES[at % len(SIZES)]) for at, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "gpus"), EVERY if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT)
def test_each_recipe_has_a_proposal_that_a_check_accepts(name, gpus):
    cfg = load(f"{RECIPES}/{name}")
    asked = request(cfg, gpus, top=2)
    found = plan(cfg, asked)
    for one in found.proposals:
        chosen = compose(f"{RECIPES}/{name}", one.candidate.overrides(cfg))
        assert chosen == one.candidate.config(cfg), "the overrides choose it"
        report = check(chosen, without_data=True)
        assert not report.faults, report.faults
        assert one.candidate.world_size <= gpus
        chosen.data.tokenizer = "bytes"  # exists
        run = resolve(chosen)
        assert run.layout.world_size == one.candidate.world_size
        stages = [stage for part in cfg.modules for stage in stage_memory(run, part, asked.vocab)]
        assert max(rank.total for rank in rank_memory(stages).values()) == one.memory
        assert one.memory <= asked.device.memory * (1 - asked.margin)
    seconds = [one.prediction.seconds for one in found.proposals]
    assert seconds == sorted(seconds)
    assert found.legal > 0 and found.predicted >= len(found.proposals) > 0


def test_a_model_of_30b_parameters_as_it_is_fits_by_sharding():
    cfg = load("gpt_tiny")
    sizes = {"d_model": 7168, "n_heads": 64, "n_layers": 48, "vocab_size": 50432, "max_seq_len": 8192}
    cfg.language.llm = TransformersLlm("mpt-30b", model_config={"model_type": "mpt", **sizes})
    cfg.train.precision, cfg.data.sequence_length = "bf16", 2048
    asked = request(cfg, 8, margin=0.1)
    best = plan(cfg, asked).proposals[0]
    assert best.candidate.language == LayoutConfig(dp=8, fsdp=True)
    run = resolve(best.candidate.config(cfg))
    (stage,) = stage_memory(run, "language", asked.vocab)
    parameters = cfg.llm.num_layers * (12 * 7168**2 + 2 * 7168) + (50432 + 1) * 7168
    held = stage.memory.weights + stage.memory.gradients + stage.memory.optimizer
    # 16 bytes of each parameter over 8 ranks, and the whole table in bf16.
    assert held == pytest.approx(2 * parameters + 2 * 50432 * 7168, rel=1e-3)
    assert stage.memory.total == best.memory < asked.device.memory * (1 - asked.margin)


@settings(max_examples=20)
@given(
    layers=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    groups=st.sampled_from([0, 1, 2]),
    encoder_heads=st.sampled_from([1, 2, 4, 5]),
    batch=st.sampled_from([1, 6, 8, 24, 32, 100]),
    gpus=st.integers(1, 24),
    node=st.sampled_from([1, 2, 4, 6, 8]),
    experts=st.sampled_from([0, 0, 4]),
    details=st.booleans(),
    more=st.sampled_from([
        {}, {"modules.images.balance": "images"}, {"train.recompute": "selective"},
        {"train.rampup_batch_size": [1, 1, 9]},
        {"modules.language.llm.dropout": 0.1}, {"optim.distributed_optimizer": False},
        {"modules.images.freeze": ["encoder"]}, {"data.sequence_length": 97}, {"placement.first_rank": {"images": 0,
         "language": 1}},
    ]),
)  # fmt: skip
def test_what_is_proposed_has_no_fault(layers, heads, groups, encoder_heads, batch, gpus, node, experts, details, more):
    values = {
        "modules.language.llm.num_layers": layers,
        "modules.language.llm.num_attention_heads": heads,
        "modules.language.llm.hidden_size": 16 * heads,
        "modules.language.llm.num_query_groups": groups if groups and heads % groups == 0 else 0,
        "modules.images.encoder.num_attention_heads": encoder_heads,
        "modules.images.encoder.hidden_size": 16 * encoder_heads,
        "train.global_batch_size": batch,
        "modules.language.llm.num_experts": experts,
        "modules.language.llm.experts_per_token": 2,
    }
    cfg = changed(values | more)
    if details:
        cfg.modules = {"details": from_dict(to_dict(cfg)).modules["images"], **cfg.modules}
        if cfg.placement.first_rank:
            cfg.placement.first_rank["details"] = 2
    asked = request(cfg, gpus, node=node, top=3)
    try:
        require_sound(cfg)
    except ConfigError:
        return  # not a run at all
    found = plan(cfg, asked)  # a valid run on one GPU has a layout
    for one in found.proposals:
        chosen = one.candidate.config(cfg)
        assert not check(chosen, without_data=True).faults
        run = resolve(chosen)
        assert run.layout.world_size == one.candidate.world_size <= gpus
        assert 0 < one.prediction.seconds and 0 <= one.prediction.bubble < 1
        assert set(one.prediction.idle) == set(cfg.modules)
        assert sum(one.prediction.shares.values()) == pytest.approx(1)


def test_a_config_with_faults_is_not_planned():
    for values, key in (({"optim.lr": -1.0}, "optim.lr"), ({"modules.language.llm": None}, "modules.language.llm")):
        with pytest.raises(ConfigError, match=key):
            require_sound(changed(values))
    require_sound(load("vlm_digits"))


def test_what_fits_nowhere_says_how_much_is_missing():
    cfg = load(f"{RECIPES}/llava_1_5_finetune")
    device = replace(DEVICES["h100"], memory=4e9)
    with pytest.raises(
        UserError, match=r"--gpus: no layout fits on 8 x h100: .* GiB a rank, and 3.17 GiB are there \(15%"
    ):
        plan(cfg, request(cfg, 8, device=device))


def test_less_memory_leaves_fewer_layouts():
    cfg = load(f"{RECIPES}/llava_1_5_finetune")
    best = {}
    for memory in (40e9, 80e9, 141e9):
        (one, *_) = plan(cfg, request(cfg, 8, device=replace(DEVICES["h100"], memory=memory))).proposals
        assert one.memory <= 0.85 * memory
        best[memory] = one.prediction.seconds
    assert best[40e9] > best[80e9] >= best[141e9]


def test_the_fastest_saving_that_fits_is_proposed():
    """On one GPU with less and less memory: of all ways to keep fewer activations, the fastest that fits."""
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 4096, "num_layers": 8, "num_attention_heads": 8}
    values = {"train__global_batch_size": 1, "train__precision": "bf16", "data__sequence_length": 8192}
    cfg = gpt(**values, **{f"modules__language__llm__{key}": size for key, size in sizes.items()})
    asked, space = request(cfg, 1, margin=0.0, top=1), Space(cfg, 1, 8)
    (whole,) = (each for each in space.language() if each.distributed_optimizer)
    ways = [("none", False), *(way for way in space.savings() if way != ("full", True))]
    seconds, fullest = predictor(cfg, asked, dict(ways)).seconds, FullestRank(cfg, asked.vocab, asked.media)
    options = [replace(whole, recompute=recompute, offload=offload) for recompute, offload in ways]
    proposed = set()
    for room in map(fullest, options):
        (best,) = plan(cfg, replace(asked, device=replace(asked.device, memory=float(room)))).proposals
        fastest = min((each for each in options if fullest(each) <= room), key=seconds)
        assert best.prediction.seconds == seconds(fastest), (best.candidate, fastest)
        proposed.add((best.candidate.recompute, best.candidate.offload))
    assert {("none", False), ("norms", False), ("attention+mlp+norms", False)} <= proposed, proposed
    assert any(offload for _, offload in proposed), proposed


@pytest.mark.parametrize("rate", ["half", "traffic", "inside", "across"])
def test_a_better_device_is_never_slower(rate):
    cfg = load(f"{RECIPES}/llava_1_5_finetune")
    asked = request(cfg, 16, top=3)
    faster = replace(asked, device=replace(asked.device, **{rate: 2 * getattr(asked.device, rate)}))
    found = plan(cfg, asked).proposals
    best = plan(cfg, faster).proposals[0].prediction.seconds
    # Among proposals within 1 %, the one with fewer ranks is shown.
    assert best <= 1.01 * found[0].prediction.seconds
    for one in found:
        assert seconds_of(cfg, faster, one.candidate) <= one.prediction.seconds


def gpt(**values):
    """Return a language model alone, with four layers and 16 samples a step."""
    own = {"train.global_batch_size": 16, "modules.language.llm.tie_embeddings": True}
    return changed(own | {key.replace("__", "."): value for key, value in values.items()}, config="gpt_tiny")


def free(rate: float) -> Device:
    """Return a device with this FLOP/s, on which memory and messages take no time but latency."""
    return replace(DEVICES["h100"], half=rate, single=rate, inside=1e18, across=1e18, traffic=1e18)


def candidate(micro: int = 1, **sizes: int) -> Candidate:
    layout = replace(load("gpt_tiny").language.layout, **sizes)
    return Candidate({"language": layout}, micro, "none", True, 0, 8)


def test_free_messages_make_replicas_the_best():
    """With links that only cost latency and a free update, replicas have no bubble."""
    cfg = gpt()
    asked = request(cfg, 4, device=free(1e9))
    (best, *_) = plan(cfg, asked).proposals
    assert asdict(best.candidate.language) | {"dp": 1} == asdict(load("gpt_tiny").language.layout)
    assert best.candidate.language.dp == 4 and best.prediction.bubble == pytest.approx(0)


def test_a_step_by_hand():
    """One rank: forward and backward FLOPs of 16 samples over their rates. Two stages take half of that, plus one
    bubble."""
    from mimo_train.estimate.flops import module_work

    def seconds(work):
        matmuls, attention = work.matmuls + work.matmuls_back, work.attention + work.attention_back
        return matmuls / (1e9 * MATMULS) + attention / (1e9 * ATTENTION)

    cfg = gpt()
    asked = request(cfg, 4, device=free(1e9))
    work = module_work(cfg, "language", ROWS, 0.0)
    whole = work.whole
    sample = seconds(whole)
    # Matrices alone, from the sizes: 3 times 2 FLOPs per weight and token, and attention over half of the pairs.
    llm, length = cfg.llm, cfg.data.sequence_length
    weights = 4 * (4 * llm.hidden_size**2 + 3 * llm.hidden_size * llm.ffn_hidden_size) + ROWS * llm.hidden_size
    attention = 4 * 4 * llm.hidden_size * length * (length + 1) / 2
    assert whole.matmuls == 2 * weights * length and whole.matmuls_back == 2 * whole.matmuls
    assert whole.attention == attention and whole.attention_back == 2 * attention
    assert seconds_of(cfg, asked, candidate()) == pytest.approx(16 * sample)
    assert seconds_of(cfg, asked, candidate(dp=4)) == pytest.approx(4 * sample, rel=1e-3)
    assert seconds_of(cfg, asked, candidate(tp=2)) == pytest.approx(8 * sample, rel=1e-2)
    last = work.of_stage(1, 2)
    slower = seconds(last)
    two = seconds_of(cfg, asked, candidate(pp=2))
    assert two == pytest.approx(16 * slower + (sample - slower), rel=1e-3)


def test_matmuls_in_fp8_by_hand():
    """fp8 doubles the rate of the first three of four layers: queries, keys and values, projection, feed-forward."""
    from mimo_train.estimate.flops import module_work

    fp8 = {"train__fp8": "tensorwise", "train__precision": "bf16", "train__num_layers_at_end_in_bf16": 1}
    plain, cfg = gpt(train__precision="bf16"), gpt(**fp8)
    llm, length = cfg.llm, cfg.data.sequence_length
    without, work = (module_work(one, "language", ROWS, 0.0).whole for one in (plain, cfg))
    in_fp8 = 3 * 2 * length * (4 * llm.hidden_size**2 + 3 * llm.hidden_size * llm.ffn_hidden_size)
    assert (work.in_fp8, work.in_fp8_back, without.in_fp8) == (in_fp8, 2 * in_fp8, 0)
    assert (work.matmuls, work.matmuls_back, work.total) == (without.matmuls, without.matmuls_back, without.total)

    device = replace(free(1e9), eighth=2e9)
    fast, slow, old = (
        seconds_of(one, request(one, 1, device=on), candidate())
        for one, on in ((cfg, device), (plain, device), (cfg, replace(device, eighth=0.0)))
    )
    attention = (work.attention + work.attention_back) / (1e9 * ATTENTION)
    matmuls = (work.matmuls + work.matmuls_back - 3 * in_fp8 + 3 * in_fp8 / 2) / (1e9 * MATMULS)
    assert fast == pytest.approx(16 * (matmuls + attention), rel=1e-6)
    assert old == pytest.approx(slow, rel=1e-9) and fast < slow


def stages(forward: list[float], backward: list[float], send: float = 0.0) -> list[Stage]:
    """Return a chain."""
    last = len(forward) - 1
    return [
        Stage(
            ("language",), at, last + 1, at + 1 if at < last else None, send, 1, *seconds, 0.0, 0.0, 0.0, sum(seconds)
        )
        for at, seconds in enumerate(zip(forward, backward, strict=True))
    ]


def test_two_stages_by_hand():
    """Forward 1 and 3, backward 1 and 3, messages of 1: the second stage is busy from 2 to 20, then the last gradient
    goes back."""
    assert schedule_seconds(stages([1, 3], [1, 3], send=1), 3) == 22


def test_two_sources_meet_at_their_destination():
    """The slower of two parallel encoders decides; the other one costs nothing."""
    slow, last = stages([2, 1], [0, 1])
    fast = slow._replace(forward=1, first=1)
    both = [slow._replace(destination=2), fast._replace(destination=2), last]
    assert schedule_seconds(both, 3) == schedule_seconds([slow, last], 3) == 8
