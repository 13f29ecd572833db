"""Placement of modules on nodes and with idle processes, and the messages about it."""

import pytest

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.launch import processes
from mimo_train.layout import placement
from mimo_train.layout.run import layout_faults, resolve
from tests.unit.configs import changed
from tests.unit.layout.test_layout import arranged

ALLOWED = {"placement.allow_idle": True}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launcher(monkeypatch):
    """Pretend that a launcher has started this process."""

    def launch(rank: int, world_size: int, per_node: int | None = None) -> None:
        per_node = per_node or world_size
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("LOCAL_RANK", str(rank % per_node))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(-(-world_size // per_node)))

    return launch


def on_nodes(ranks_per_node: int, language: dict, first=None, across: bool = False, **encoders: dict):
    cfg = arranged(language, first=first, **encoders)
    cfg.placement.ranks_per_node, cfg.placement.tp_across_nodes = ranks_per_node, across
    return cfg


def started(cfg) -> list[str]:
    """Return the faults of running this config on the started processes."""
    try:
        processes.started_run(cfg)
    except ConfigError as error:
        return [str(fault) for fault in error.faults]
    return []


def test_ranks_count_the_processes_that_have_a_module():
    cfg = arranged({"dp": 2}, first={"images": 1, "language": 4}, images={"dp": 2})
    cfg.placement.allow_idle = True
    plan = resolve(cfg).layout
    assert plan.processes == (1, 2, 4, 5) and plan.world_size == 4
    assert list(plan.modules["images"].ranks) == [0, 1] and list(plan.language.ranks) == [2, 3]


def test_a_process_takes_its_rank_for_the_run_and_gives_it_back(launcher, monkeypatch):
    cfg = arranged({}, first={"images": 0, "language": 2}, images={})
    cfg.placement.allow_idle = True
    plan = resolve(cfg).layout
    launcher(2, 4)
    assert started(cfg) == []
    with processes.numbered(plan):
        assert [processes.os.environ[name] for name in ("RANK", "WORLD_SIZE")] == ["1", "2"]
    assert [processes.os.environ[name] for name in ("RANK", "WORLD_SIZE")] == ["2", "4"]
    idle = []
    for rank in range(4):
        launcher(rank, 4)
        idle.append(processes.is_idle(plan))
    assert idle == [False, True, False, True]


def test_without_a_launcher_nothing_stays_behind():
    with processes.numbered(resolve(arranged({}, mode="shared", images={})).layout):
        assert processes.os.environ["RANK"] == "0"
    assert "RANK" not in processes.os.environ


def test_each_node_has_one_first_process_that_is_not_idle(launcher):
    cfg = arranged({"dp": 3}, (24, 8), first={"images": 1, "language": 5}, images={"dp": 2})
    cfg.placement.allow_idle = True
    plan = resolve(cfg).layout  # processes 1 2 . . 5 6 7
    first = []
    for rank, process in enumerate(plan.processes):
        launcher(process, 8, per_node=4)
        if processes.is_first_of_node(plan, rank):
            first.append(process)
    assert first == [1, 5]


def test_the_order_that_keeps_tensor_parallel_groups_on_a_node_is_taken():
    plan = resolve(on_nodes(2, {"tp": 2}, images={}, sounds={"tp": 2})).layout
    assert {name: module.first_rank for name, module in plan.modules.items()} == {
        "images": 4,
        "sounds": 0,
        "language": 2,
    }
    assert list(plan.modules) == ["images", "sounds", "language"]
    stays = on_nodes(4, {"tp": 2}, images={"dp": 2})
    assert resolve(stays).layout.language.first_rank == 2 and placement.moved_for_nodes(stays) == ""
    cfg = on_nodes(2, {"tp": 2}, images={})
    assert resolve(cfg).layout.modules["images"].first_rank == 2 and resolve(cfg).layout.language.first_rank == 0
    said = placement.moved_for_nodes(cfg)
    assert "order language, images" in said and "(images, language)" in said and "nodes of 2" in said


def test_the_config_s_order_stands_where_groups_may_cross():
    plan = resolve(on_nodes(2, {"tp": 2}, across=True, images={})).layout
    assert plan.language.first_rank == 1


def test_where_no_order_fits_a_first_rank_must_be_a_multiple():
    cfg = on_nodes(6, {"tp": 3}, images={"tp": 2}, sounds={"tp": 2})
    (fault,) = placement.placement_faults(cfg)
    assert (fault.key, fault.message) == (
        "modules.language.layout.tp",
        "ranks 4-6 of language are one tensor-parallel group (tp 3) on two nodes of 6 ranks: let it start at a "
        "multiple of 3 with placement.first_rank, and placement.allow_idle for a gap, or set "
        "placement.tp_across_nodes=true",
    )
    cfg.placement.first_rank, cfg.placement.allow_idle = {"images": 0, "sounds": 2, "language": 6}, True
    assert list(placement.placement_faults(cfg)) == []


def test_many_modules_that_fit_in_no_order_are_refused_at_once():
    cfg = on_nodes(3, {"tp": 2}, **{f"images{at}": {"tp": 2} for at in range(11)})
    assert "does not divide a node: use a divisor of 3" in next(placement.placement_faults(cfg)).message


def test_the_launcher_s_nodes_are_looked_at_too(launcher):
    cfg = on_nodes(3, {"tp": 2}, first={"images": 0, "language": 1}, images={})
    launcher(0, 3)
    assert started(cfg) == []
    cfg.placement.ranks_per_node, cfg.placement.allow_idle = 8, True
    launcher(0, 4, per_node=2)
    (said,) = started(cfg)
    assert "ranks 1-2 of language" in said and "nodes of 2" in said


def test_nodes_are_the_launcher_s_unless_the_config_says(launcher):
    cfg = arranged({"tp": 2}, images={"dp": 2})
    launcher(0, 4, per_node=2)
    run = processes.started_run(cfg)
    assert run.layout.ranks_per_node == 2
    assert cfg.placement.ranks_per_node == run.cfg.placement.ranks_per_node == 0, "the config is the user's"
    launcher(0, 4)
    assert processes.started_run(cfg).layout.ranks_per_node == 0
    cfg.placement.ranks_per_node = 4
    launcher(0, 4, per_node=2)
    assert processes.started_run(cfg).layout.ranks_per_node == 4


def test_nodes_with_other_numbers_of_processes_are_refused(launcher):
    """Each node would place the modules by its own number."""
    cfg = arranged({"tp": 2}, images={"dp": 4})
    launcher(0, 6, per_node=4)
    (said,) = started(cfg)
    assert said == "LOCAL_WORLD_SIZE: 6 processes on 2 nodes, and 4 of them here: start as many on each node"
    launcher(0, 6, per_node=3)
    assert "LOCAL_WORLD_SIZE" not in "".join(started(cfg))


@pytest.mark.parametrize("first", [{}, {"placement.first_rank": {"images": 0, "language": 2}}], ids=["more", "a hole"])
def test_only_pretrain_lets_processes_end_without_a_module(first, launcher):
    from mimo_train.bridge.training.setup import setup

    launcher(0, 3)
    with pytest.raises(ConfigError, match="placement.allow_idle: 3 processes for 2 ranks"):
        setup(changed(ALLOWED | first))


def test_the_first_node_has_a_module():
    cfg = on_nodes(2, {}, first={"images": 2, "language": 3}, images={})
    cfg.placement.allow_idle = True
    (fault,) = layout_faults(cfg)
    assert fault.key == "placement.first_rank" and "ranks 0-1" in fault.message and "below rank 2" in fault.message


@pytest.mark.parametrize(
    ("cfg", "count", "words"),
    [
        (arranged({}, images={}), 3, ["or let 1 be idle", "needs 2", "plan CONFIG --gpus 3"]),
        (arranged({"tp": 2, "pp": 2}, images={"tp": 2}), 5, ["change modules.images.layout and modules.language"]),
        (arranged({}, images={}), 1, ["1 process started", "needs 2: images 1 (one rank), language 1 (one rank)"]),
    ],
)
def test_another_number_of_processes_is_refused(cfg, count, words, launcher):
    launcher(0, count)
    (said,) = started(cfg)
    assert said.startswith("WORLD_SIZE: ") and all(word in said for word in words), said
    assert ("idle" in said) == (count > resolve(cfg).layout.world_size)


def test_more_processes_may_be_idle_and_fewer_may_not(launcher):
    cfg = changed(ALLOWED)
    launcher(0, 5)
    assert started(cfg) == []
    launcher(0, 1)
    assert len(started(cfg)) == 1


def test_pretrain_refuses_processes_before_they_meet(launcher):
    from mimo_train.training.pretrain import pretrain

    launcher(0, 3)
    cfg = changed({})
    with pytest.raises(ConfigError) as raised:
        pretrain(cfg)
    assert [str(fault) for fault in raised.value.faults] == started(cfg)


@pytest.mark.parametrize("config", ["gpt_tiny", {"train": {"iters": 1}}, None], ids=["name", "keys", "none"])
def test_what_is_no_config_is_named_at_every_entry(launcher, config):
    from mimo_train.bridge.training.finetune import finetune
    from mimo_train.bridge.training.pretrain import pretrain
    from mimo_train.bridge.training.setup import setup

    launcher(0, 1)
    for entry in (pretrain, finetune, setup):
        with pytest.raises(UserError, match=f"config: expected a ConfigContainer, got {type(config).__name__}. Load"):
            entry(config)


def test_pretrain_ends_at_once_where_no_module_stands(launcher, capsys):
    from mimo_train.training.pretrain import pretrain

    launcher(4, 5)
    assert pretrain(changed(ALLOWED)) == 0
    assert capsys.readouterr().out == "process 4: no module is placed here (placement.allow_idle), exiting\n"
