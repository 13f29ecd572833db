"""The files of a run: what they extend, that they are only data, and that texts stay as written."""

import os
import sys

import pytest
import yaml

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError


@pytest.fixture
def team(tmp_path):
    """Make a folder `team` with a run and its own groups, next to a folder `mine`."""
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
    """Write a run in `mine` that extends `entry`."""
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
    cfg = compose.load(str(tmp_path / "mine.yaml"), ["layout=images_8"])
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


def faults(config, *overrides):
    with pytest.raises(ConfigError) as raised:
        compose.load(str(config), overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {dir: '${oc.env:HOME}'}\n", "run.dir: is '${oc.env:HOME}', but a config cannot call anything"),
        ("data: {shards: 'x-${oc.env:SECRET,none}.tar'}\n", "data.shards: is"),
        ("data: {shards: '${oc.${run.dir}:HOME}'}\nrun: {dir: env}\n", "data.shards: is"),
        ("data: {shards: '${${run.dir}:HOME}'}\nrun: {dir: oc.env}\n", "data.shards: is"),
        ("hydra: {searchpath: ['pkg://hostile_package']}\n", "run.yaml: a run cannot set keys of Hydra"),
        ("run: !!python/object/apply:os.system ['touch ran']\n", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_more_than_data_is_a_fault(tmp_path, monkeypatch, text, said):
    (tmp_path / "hostile_package.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET", "hidden")
    (tmp_path / "run.yaml").write_text("defaults: [vlm_digits, _self_]\n" + text)
    found = faults("run.yaml")
    assert said in found and "hidden" not in found and os.environ["HOME"] not in found.replace(str(tmp_path), "")
    assert not (tmp_path / "ran").exists() and "hostile_package" not in sys.modules


def test_overrides_are_looked_at_too():
    assert "run.dir: is '${oc.env:HOME}'" in faults("vlm_digits", "run.dir=${oc.env:HOME}")
    assert "hydra: unknown key" in faults("vlm_digits", "hydra.searchpath=[pkg://x]")


def test_names_of_keys_may_still_be_interpolated():
    assert compose.load("vlm_digits", ["run.dir=runs/${run.seed}"]).run.dir == "runs/1234"


LIKE_NUMBERS = "20241012_153000 12:30 0012 1e5 1E5 1_000 0x1F 0b11 +5 1.50 1.0e-3 2024 .5 5. 0o17 -0 1e-7 2024-10-12 09"


@pytest.mark.parametrize("text", LIKE_NUMBERS.split())
def test_a_text_that_looks_like_a_number_stays_as_written(tmp_path, text):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(f"shards: {text}\n")
    (tmp_path / "run.yaml").write_text(
        f"defaults: [vlm_digits, {{override data@data: mine}}, _self_]\nrun: {{dir: {text}}}\ntrain: {{iters: 3}}\n"
    )
    cfg = compose.load(
        str(tmp_path / "run.yaml"),
        [
            f"data.validation={{more: {{shards: {text}}}}}",
            f"data.mix=[{{shards: {text}, name: {text}}}]",
            f"+data.cache_dir={text}",
            f"data.mix[0].name={text}",
            "data.validation_shards=x-${run.dir}",
            f"modules.images.freeze=[{text}]",
        ],
    )
    assert cfg.run.dir == cfg.data.shards == cfg.data.cache_dir == text
    assert cfg.data.validation["more"].shards == cfg.data.mix[0].shards == cfg.data.mix[0].name == text
    assert (cfg.data.validation_shards, cfg.modules["images"].freeze) == (f"x-{text}", [text])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(compose.to_yaml(cfg))
    assert compose.load(str(resolved)) == compose.from_dict(yaml.safe_load(resolved.read_text())) == cfg


@pytest.mark.parametrize(
    ("override", "value"),
    [("optim.lr=1e-3", 0.001), ("optim.lr=1.0E-3", 0.001), ("train.iters=1_000", 1000), ("train.iters=0012", 12),
     ("run.seed=0x10", 16), ("optim.lr=0.10", 0.1), ("data.template_variables.a=010", 10),
     ("data.template_variables.a=1e1", 10.0)],
)  # fmt: skip
def test_a_number_is_read_in_base_ten_unless_marked(override, value):
    found = compose.load("vlm_digits", [override])
    for name in override.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.iters=12:30", "'12:30'"),
        ("train.iters=1e3", "is 1e3"),
        ("optim.lr=.nan", "finite"),
        ("train.iters=0o17", "0o17"),
    ],
)
def test_what_is_no_number_is_a_fault_that_repeats_it(override, message):
    with pytest.raises(ConfigError, match=message):
        cfg = compose.load("vlm_digits", [override])
        raise ConfigError(cfg.faults())
