"""A run that extends files of the user's own, from any folder."""

import pytest

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError


@pytest.fixture
def team(tmp_path):
    """A folder `team` with a run and groups of its own, next to a folder `mine`."""
    for folder in ("team/optim", "team/layout", "mine/llm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "team/optim/fast.yaml").write_text("lr: 0.5\n")
    (tmp_path / "team/layout/half.yaml").write_text("# @package _global_\ntrain: {exit_interval: 4}\n")
    (tmp_path / "team/run.yaml").write_text(
        "defaults: [vlm_digits, {override optim: fast}, _self_]\ntrain: {iters: 7, eval_interval: 3}\n"
    )
    (tmp_path / "mine/llm/small.yaml").write_text("name: small\nnum_layers: 1\n")
    return tmp_path / "team"


def extending(team, entry, *more):
    """A run in `mine` that extends `entry`."""
    file = team.parent / "mine" / "run.yaml"
    file.write_text(f"defaults: [{entry}, {', '.join([*more, '_self_'])}]\ntrain: {{iters: 9}}\n")
    return str(file)


@pytest.mark.parametrize("entry", ["../team/run", "../team/run.yaml", "TEAM/run.yaml"])
def test_a_run_extends_one_of_another_folder(team, entry):
    cfg = compose.load(extending(team, entry.replace("TEAM", str(team))))
    assert (cfg.train.iters, cfg.train.eval_interval, cfg.optim.lr) == (9, 3, 0.5)
    assert cfg.modules["images"].encoder.name == "vit_tiny"


def test_it_picks_from_the_groups_of_all_folders(team):
    file = extending(team, "../team/run", "{override llm@modules.language.llm: small}")
    assert compose.load(file).language.llm.num_layers == 1
    cfg = compose.load(file, ["layout=half", "llm@modules.language.llm=gpt_tiny", "optim=adamw"])
    assert (cfg.train.exit_interval, cfg.language.llm.name, cfg.optim.lr) == (4, "gpt_tiny", 1e-3)


def test_a_chain_of_files_is_followed_and_groups_extend_files_of_theirs(team):
    (team / "optim/faster.yaml").write_text("defaults: [fast, _self_]\nmin_lr: 0.25\n")
    (team / "long.yaml").write_text("defaults: [run, {override optim: faster}, _self_]\ntrain: {exit_interval: 2}\n")
    cfg = compose.load(extending(team, "../team/long"))
    assert (cfg.train.exit_interval, cfg.train.eval_interval, cfg.optim.lr, cfg.optim.min_lr) == (2, 3, 0.5, 0.25)


def test_a_run_extends_a_recipe_and_a_shipped_run_of_its_own_name(tmp_path):
    (tmp_path / "vlm_digits.yaml").write_text("defaults: [vlm_digits, _self_]\ntrain: {iters: 9}\n")
    cfg = compose.load(str(tmp_path / "vlm_digits.yaml"))
    assert (cfg.train.iters, cfg.modules["images"].encoder.name) == (9, "vit_tiny")
    (tmp_path / "mine.yaml").write_text("defaults: [recipes/siglip2_qwen3, _self_]\ndata: {tokenizer: bytes}\n")
    cfg = compose.load(str(tmp_path / "mine.yaml"), ["layout=pictures_8"])
    assert (cfg.language.llm.name, cfg.data.tokenizer) == ("qwen3_4b", "bytes")


def test_folders_may_have_any_name(tmp_path):
    folder = tmp_path / "a b,c='[x]{y}"
    (folder / "optim").mkdir(parents=True)
    (folder / "optim/fast.yaml").write_text("lr: 0.5\n")
    (folder / "base.yaml").write_text("defaults: [vlm_digits, {override optim: fast}, _self_]\n")
    (tmp_path / "run.yaml").write_text(f'defaults: ["{folder}/base.yaml", _self_]\n')
    assert compose.load(str(folder / "base.yaml")).optim.lr == compose.load(str(tmp_path / "run.yaml")).optim.lr == 0.5


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[../team/rn]", "extends '../team/rn', but there is no such file in "),
        ("[vlm_digit]", "extends 'vlm_digit', but there is no such file in "),
        ("[../mine/other]", "other.yaml extends itself, through "),
    ],
)
def test_a_base_that_cannot_be_is_a_fault(team, defaults, message):
    mine = team.parent / "mine"
    (mine / "other.yaml").write_text("defaults: [run]\n")
    (mine / "run.yaml").write_text(f"defaults: {defaults}\n")
    with pytest.raises(ConfigError, match=f"^defaults: .*{message}"):
        compose.load(str(mine / ("other.yaml" if "other" in defaults else "run.yaml")))


def test_what_a_base_leaves_open_is_to_be_given(team):
    (team / "run.yaml").write_text("defaults: [vlm_digits, _self_]\ndata: {shards: '???'}\n")
    file = extending(team, "../team/run")
    with pytest.raises(ConfigError, match=r"^data\.shards: is \?\?\?"):
        compose.load(file)
    assert compose.load(file, ["data.shards=mine"]).data.shards == "mine"
    with open(file, "a") as text:
        text.write("data: {shards: yours}\n")
    assert compose.load(file).data.shards == "yours"


def test_a_file_that_is_extended_sets_no_keys_of_hydra(team):
    (team / "run.yaml").write_text("hydra: {searchpath: ['pkg://hostile_package']}\n")
    with pytest.raises(ConfigError, match="keys of Hydra"):
        compose.load(extending(team, "../team/run"))
