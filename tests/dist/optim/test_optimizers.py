"""Muon, Lion and Adafactor at other layouts: the numbers of one process, and a resume to the bit with moments in fewer
bytes. `test_resharding` reads their checkpoints at other layouts."""

from dataclasses import replace
from pathlib import Path

import pytest

from mimo_train.checkpoint.format.index import WEIGHT, is_of_rank
from mimo_train.checkpoint.format.read import Reader
from tests.dist.layout_tables import WHOLE_STATES, Row, apart, same
from tests.dist.parameters import largest_change, weights_of
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

STEPS, SAVED = 6, 3
FIXED = (
    "layout=one_process",
    "train.global_batch_size=8",
    f"train.iters={STEPS}",
    # Queries, keys and values of two groups in one weight, as gate and up are.
    "modules.language.llm.num_query_groups=2",
    "modules.language.llm.tie_embeddings=false",
    "optim.lr=2e-3",
    "optim.min_lr=0",
    "placement.allow_idle=true",
)
SHARED = same("tp2 dp2", "tp2 dp2")
EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.num_layers=2",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "modules.language.optim.name=muon",
)
ADAPTERS = (
    "modules.language.lora.rank=3",
    "modules.language.lora.targets=[linear_qkv,linear_proj,experts,shared_experts]",
)
SCHEDULES = (
    "modules.language.optim.decay=wsd",
    "modules.language.optim.wsd_decay_fraction=0.5",
    "modules.images.optim.decay=inverse_sqrt",
    "modules.images.optim.warmup_iters=2",
)
CASES = {
    "muon and adafactor": ("modules.language.optim.name=muon", "modules.images.optim.name=adafactor", *SCHEDULES),
    "adafactor and muon": ("modules.language.optim.name=adafactor", "modules.images.optim.name=muon"),
    "muon of experts": EXPERTS,
    "muon of experts' adapters": (*EXPERTS, *ADAPTERS),
}
ROWS = {
    # With tp4 two ranks share a group of heads.
    "muon and adafactor": (SHARED, same("dp2", "cp2 pp2"), same("dp4", "tp4")),
    "adafactor and muon": (apart("tp2", "tp2", WHOLE_STATES),),
    "muon of experts": (apart("dp2", "cp2 ep2"),),
    "muon of experts' adapters": (apart("dp2", "tp2 sp ep2"),),
}


def run_config(digits, run_dir: Path, row: Row | None, *overrides: str):
    layout = ["train.micro_batch_size=4"] if row is None else row.overrides(4)
    return config("vlm_digits", run_dir, digits, *FIXED, *layout, *overrides)


def _train(cfg) -> tuple[list[tuple], str]:
    run = Steps(cfg)
    return run.train(STEPS), str(run.save())


@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_numbers_of_one_process(case, digits, tmp_path):
    trained = []
    for number, row in enumerate((None, *ROWS[case])):
        cfg = run_config(digits, tmp_path / str(number), row, *CASES[case])
        ranks = run_ranks(_train, 1 if row is None else 4, cfg)
        trained.append((row, whole([points for points, _ in ranks]), weights_of(Path(ranks[0][1]))))
    (_, points, weights), *at_layouts = trained
    assert points[-1][1] < points[0][1]
    for row, others, other_weights in at_layouts:
        loss, norm = largest_difference(points, others)
        change, name = largest_change(*map(_determined, (weights, other_weights)))
        assert loss < 1e-5 and norm < 1e-4, (row, loss, norm)
        assert change < 1e-5, (row, change, name)


def _determined(weights: dict) -> dict:
    """Leave out biases of keys: their gradient is rounding, which updates of a fixed size make large."""
    return {name: value for name, value in weights.items() if not name.endswith("linear_qkv.bias")}


def _resume(cfg, resumed) -> tuple[list[list[tuple]], list[str]]:
    """(loss, gradient norm) after a checkpoint, without a stop and resumed; checkpoints at both ends, and one as
    soon as it is resumed."""
    run = Steps(cfg)
    run.train(SAVED)
    again = Steps(replace(resumed, checkpoint=replace(resumed.checkpoint, resume=str(run.save()))))
    first, runs = str(again.save()), (run, again)
    return [each.train(STEPS - SAVED) for each in runs], [*(str(each.save()) for each in runs), first]


def _values(folder: str) -> dict:
    """Every weight and state of a checkpoint."""
    reader = Reader(Path(folder))
    return {key: reader.whole(key) for key in reader.index.pieces if not is_of_rank(key)}


def test_states_are_resumed_to_the_bit(digits, tmp_path):
    small = ("modules.language.optim.name=lion", "modules.language.optim.moments=8bit", "optim.ema=0.9")
    # The encoder's average begins after the checkpoint.
    small += ("modules.images.optim.name=muon", "modules.images.optim.moments=bf16")
    cfg = run_config(digits, tmp_path / "run", SHARED, *small, "modules.images.optim.ema=0")
    resumed = run_config(digits, tmp_path / "resumed", SHARED, *small, "optim.offload=true")
    ranks = run_ranks(_resume, 4, cfg, resumed)
    rest, again = (whole([curves[index] for curves, _ in ranks]) for index in (0, 1))
    assert rest == again
    values, ended, first = map(_values, ranks[0][1])
    assert {key.module for key in values if key.state == "ema"} == {"language"}
    assert not [key for key in values if not values[key].equal(ended[key])]
    started = [key for key in first if key.module == "images" and key.state == "ema"]
    assert started and all(first[key].equal(first[key._replace(state=WEIGHT)]) for key in started)
    assert not any(ended[key].equal(ended[key._replace(state=WEIGHT)]) for key in started)
