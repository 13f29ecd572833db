"""Every layout reads what every other layout has written: no element of a weight or a moment differs, and training goes
on with the same numbers. Every ordered pair of a table; one step of training after some, after all of them with
MIMO_ALL_LAYOUTS=1."""

import os
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import pytest

from tests.dist.layout_tables import WHOLE_STATES, Row, alone, apart, same
from tests.dist.ranks import run_ranks
from tests.dist.runs import BOUNDS, config

RANKS = 4
WRITTEN = 2
"""Steps before a checkpoint."""


@dataclass(frozen=True)
class Table:
    """Layouts of one model, all on RANKS ranks."""

    config: str
    overrides: tuple[str, ...]
    rows: tuple[Row, ...]


_VLM = ("layout=one_process", "train.global_batch_size=8")
_GPT = ("layout=language_one", "data.sequence_length=64", "train.global_batch_size=8")
_EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "modules.language.llm.num_layers=4",
)
_ADAPTERS = ("modules.language.lora.rank=2", "modules.images.lora.rank=2")
_OPTIMIZERS = (
    "modules.language.optim.name=adafactor",
    "modules.language.llm.num_query_groups=2",
    "modules.images.optim.name=muon",
    "modules.images.optim.moments=bf16",
    "optim.ema=0.9",
)

TABLES = {
    "vlm": Table(
        "vlm_digits",
        (*_VLM, "modules.language.llm.num_layers=4"),
        (
            apart("dp2", "dp2"),
            apart("tp2", "pp2 vpp2"),
            apart("dp2", "cp2", WHOLE_STATES),
            same("dp4", "tp2 dp2"),
            same("dp2", "tp2 sp pp2", WHOLE_STATES),
            Row({"images": "tp2", "language": "dp2 pp2 vpp2"}, "{images: 0, language: 0}"),
        ),
    ),
    "experts": Table(
        "gpt_tiny",
        (*_GPT, *_EXPERTS),
        (
            alone("dp4 ep2"),
            alone("tp2 sp dp2 ep2 etp2"),
            alone("pp2 vpp2 dp2", WHOLE_STATES),
            alone("cp2 tp2 sp"),
        ),
    ),
    "optimizers": Table(
        "vlm_digits",
        (*_VLM, *_OPTIMIZERS),
        (apart("dp2", "tp2"), same("tp2 dp2", "dp4", WHOLE_STATES), same("dp4", "tp2 dp2")),
    ),
    "adapters": Table(
        "vlm_digits",
        (*_VLM, *_ADAPTERS),
        (apart("dp2", "tp2"), same("tp2 dp2", "dp4", WHOLE_STATES), apart("tp2", "pp2")),
    ),
}


@dataclass
class Read:
    """What a layout has made of the checkpoint of another one, on one rank."""

    writer: int
    reader: int
    compared: int
    """Elements."""
    wrong: int
    steps: tuple[int, int]
    """Of the train state, and fewest of the optimizer's counters."""
    point: tuple[float | None, float] | None
    """Loss and gradient norm of the next step, where it is made."""


def _reshard(cfgs: list, trained_pairs: set[tuple[int, int]]) -> tuple[list[tuple], list[Read]]:
    """The next step of each layout without a stop, and what each has read of all others."""
    from mimo_train.checkpoint.format.read import Reader
    from mimo_train.checkpoint.local_shards import optimizer_shards, shards_of_model
    from tests.dist.steps import Steps

    runs, saved, whole = [], [], []
    for cfg in cfgs:
        steps = Steps(cfg)
        steps.train(WRITTEN)
        saved.append(steps.save())
        runs.append(steps)
        reader = Reader(saved[-1])
        whole.append({key: reader.whole(key) for key in reader.index.pieces})
        whole[-1]["point"] = steps.train()[0]

    def values(steps: Steps):
        """(key, span, values) of everything that this rank holds of a run."""
        held = shards_of_model(steps.model)
        of = {id(one.tensor): one for one in held}
        for one in held:
            flat = one.tensor.detach().view(-1)
            for first, last, span in one.spans(0, one.tensor.numel()):
                yield one.key(), span, flat[first:last]
        for optimizer in steps.optimizer.inner():
            for each in optimizer_shards(optimizer):
                one = of[id(each.parameter)]
                for state in each.values:
                    yield from ((one.key(state), span, part) for span, part in each.spans(one, state))

    found = []
    for reader, steps in enumerate(runs):
        for writer, folder in enumerate(saved):
            if reader == writer:
                continue
            for _, _, value in values(steps):
                value.fill_(float("nan") if value.is_floating_point() else -1)
            steps.session.checkpointer.continue_from(folder)
            compared = wrong = 0
            for key, span, value in values(steps):
                box = tuple(slice(a, a + n) for a, n in zip(span.offset, span.size, strict=True))
                right = whole[writer][key][box].reshape(-1)[span.start : span.stop].to(value.dtype)
                compared, wrong = compared + value.numel(), wrong + int((value != right).sum())
            counters = [
                int(group["step"])
                for optimizer in steps.optimizer.inner()
                if not optimizer.is_stub_optimizer
                for group in optimizer.optimizer.param_groups
                if "step" in group
            ]
            step = steps.state.train_state.step
            point = _next(cfgs[reader], folder) if (writer, reader) in trained_pairs else None
            found.append(Read(writer, reader, compared, wrong, (step, min(counters, default=step)), point))
    return [one["point"] for one in whole], found


def _next(cfg, folder: Path) -> tuple[float | None, float]:
    """Loss and gradient norm of the step after a checkpoint."""
    from tests.dist.steps import Steps

    run = replace(cfg.run, dir=f"{cfg.run.dir}_from_{folder.parents[1].name}")
    steps = Steps(replace(cfg, run=run, checkpoint=replace(cfg.checkpoint, resume=str(folder))))
    (point,) = steps.train()
    steps.session.close()
    return point


@pytest.mark.parametrize("name", TABLES)
def test_every_layout_reads_every_other(name, digits, prose, tmp_path):
    table = TABLES[name]
    rows = range(len(table.rows))
    demo = prose if table.config == "gpt_tiny" else digits
    cfgs = [
        config(table.config, tmp_path / str(number), demo, *table.overrides, *row.overrides(4), "train.iters=9",
               "optim.decay=constant")
        for number, row in enumerate(table.rows)
    ]  # fmt: skip
    some = {(number, (number + 1) % len(rows)) for number in rows}
    trained_pairs = set(permutations(rows, 2)) if os.environ.get("MIMO_ALL_LAYOUTS") else some
    ranks = run_ranks(_reshard, RANKS, cfgs, trained_pairs)
    for of in zip(*(found for _, found in ranks), strict=True):
        writer, reader = of[0].writer, of[0].reader
        said = f"{table.rows[writer]} -> {table.rows[reader]}"
        assert sum(one.compared for one in of) > 10_000 and not sum(one.wrong for one in of), said
        assert {one.steps for one in of} == {(WRITTEN, WRITTEN)}, said
        if of[0].point is not None:
            loss, norm = _point([one.point for one in of])
            was_loss, was_norm = _point([points[writer] for points, _ in ranks])
            assert abs(loss - was_loss) <= BOUNDS.loss * abs(was_loss), said
            assert abs(norm - was_norm) <= BOUNDS.norm * was_norm, said


def _point(of_ranks: list[tuple]) -> tuple[float, float]:
    losses = {loss for loss, _ in of_ranks if loss is not None}
    return max(losses), of_ranks[0][1]
