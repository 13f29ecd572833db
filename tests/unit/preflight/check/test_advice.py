"""The advice of `check`: clearly faster, legal, and itself not improved upon."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from mimo_train.config.compose import from_dict, to_dict
from mimo_train.layout.batch import Batch
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import Run
from mimo_train.preflight.check import advice, check
from mimo_train.preflight.check.advice import WORTH, advice_of, hardware
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.search import Request, _Search, compare, plan
from tests.unit.configs import changed, load
from tests.unit.preflight.check.printed import run

ROWS = 384
SAID = "this layout is predicted to take"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(advice, "_cores", lambda: 2)
    monkeypatch.setattr(advice, "_memory_of_machine", lambda: 24 * 2**30)
    monkeypatch.setattr(advice, "DRIVER", Path("/nowhere"))


def run_of(cfg) -> Run:
    return Run(cfg, lay_out(cfg), Batch.of(cfg))


def said(capsys, *argv: str) -> tuple[str, list[str]]:
    """Return the line of advice, and its overrides."""
    code, out, faults = run(capsys, *argv)
    assert code == 0 and not faults
    lines = [line for line in out.splitlines() if SAID in line]
    assert len(lines) <= 1
    if not lines:
        return "", []
    return lines[0], lines[0].partition(" with: ")[2].partition(" (as")[0].split()


def test_the_demo_over_two_processes(capsys):
    demo = "vlm_digits", "run.device=cpu"
    line, overrides = said(capsys, *demo)
    assert line.startswith("note: ") and "on 2 processes of this CPU with 2 cores" in line and "idle: images" in line
    assert overrides == [
        "modules.images.layout.dp=2", "modules.language.layout.dp=2", "placement.mode=shared",
    ]  # fmt: skip
    assert said(capsys, *demo, *overrides) == ("", [])
    assert said(capsys, *demo, "layout=one_process") == ("", [])
    # On one core more processes gain nothing over one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "_cores", lambda: 1)
        line, overrides = said(capsys, *demo, "modules.language.layout.dp=4", "train.micro_batch_size=1")
        assert "with 1 core " in line and "on 1 of them" in line
        assert said(capsys, *demo, "modules.language.layout.dp=4", "train.micro_batch_size=1", *overrides)[0] == ""


@pytest.mark.parametrize("layout", ["images_dp2_language_dp2", "images_tp2_language_pp2", "images_pp2_language_pp2"])
def test_on_gpus_it_says_which_are_assumed(capsys, layout):
    line, overrides = said(capsys, "vlm_digits", f"layout={layout}", "run.device=cuda")
    assert "4 x h100" in line and "on 1 of them" in line
    assert said(capsys, "vlm_digits", f"layout={layout}", "run.device=cuda", *overrides) == ("", [])


def test_a_recipe(capsys):
    full = ("modules.language.layout.tp=4", "modules.language.layout.dp=16", "train.recompute=full")
    recipe = "recipes/llava_1_5_finetune", "layout=images_64", *full, "train.micro_batch_size=4", "--without-data"
    line, overrides = said(capsys, *recipe)
    assert "64 x h100" in line and "train.recompute=none" in overrides
    cfg = load(*recipe[:-1])
    own = Candidate.of(cfg, 8)
    request = Request(64, 8, advice.DEVICES["h100"], 32_000, {"images": 1.0}, top=1)
    (best,) = plan(cfg, request).proposals
    found = compare(cfg, own, request, 1 - WORTH)
    assert found.better.prediction.seconds <= 1.01 * best.prediction.seconds <= (1 - WORTH) * found.own.seconds
    assert found.better.memory <= 0.85 * 80e9
    assert said(capsys, *recipe, *overrides) == ("", [])


def test_nothing_is_said_where_it_could_not_be_right(capsys):
    two = "vlm_digits", "run.device=cpu"
    assert said(capsys, *two)[0]
    assert not said(capsys, *two, "--without-data")[0], "the vocabulary is not known"
    assert not said(capsys, *two, "launch.layouts={1: layout=one_process}")[0]
    code, out, _ = run(capsys, *two, "data.shards=nowhere", "data.demo=")
    assert code == 1 and SAID not in out


def test_a_clear_difference_is_asked_for(monkeypatch):
    """A layout that saves slightly less than `WORTH` is not named."""
    cfg = load("vlm_digits", "run.device=cpu")
    found = advice_of(run_of(cfg), ROWS, {})
    saved = 1 - found.better.prediction.seconds / found.now.seconds
    assert saved > WORTH
    monkeypatch.setattr(advice, "WORTH", saved + 1e-6)
    assert advice_of(run_of(cfg), ROWS, {}) is None


def test_what_the_run_is_for(monkeypatch, tmp_path):
    def of(name: str, *overrides: str) -> tuple[str, int]:
        device, node = hardware(run_of(load(name, *overrides)), ROWS, {"images": 1.0})
        return device.name, node

    demo = "vlm_digits", "layout=images_dp1_language_dp2"
    cpu = "processes of this CPU with 2 cores"
    assert of(*demo) == of(*demo, "run.device=cpu") == (cpu, 3)
    assert of(*demo, "run.device=cuda") == ("h100", 8)
    assert of("recipes/llava_1_5_finetune", "layout=images_8") == ("h100", 8), "too large for this machine"
    assert of("recipes/llava_1_5_finetune", "layout=images_64") == ("h100", 8)
    for number in range(3):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(advice, "DRIVER", tmp_path)
    assert of(*demo) == ("h100", 8)
    assert of(*demo, "modules.language.layout.dp=4") == (cpu, 5), "more ranks than GPUs"
    assert of(*demo, "run.device=cpu") == (cpu, 3)


def test_a_config_is_the_candidate_that_it_has():
    first_ranks = "placement.first_rank={images: 0, audio: 0, language: 1}"
    for name, *overrides in (
        ("vlm_digits", "layout=images_tp2_language_pp2"),
        ("vlm_digits", "layout=one_process"),
        ("vlm_digits", "placement.first_rank={images: 1, language: 0}"),
        ("vlm_digits", "placement.first_rank={images: 1, language: 2}", "placement.allow_idle=true"),
        ("gpt_tiny", "layout=language_pp2_vpp2"),
        ("mixed_tiny", "placement.mode=disjoint"),
        ("mixed_tiny", "placement.mode=disjoint", first_ranks),
        ("recipes/siglip2_qwen3", "layout=images_64"),
    ):
        cfg = load(name, *overrides)
        own, layout = Candidate.of(cfg, 8), lay_out(cfg)
        assert own.gpus == layout.processes[-1] + 1 and own.world_size == layout.world_size
        again = lay_out(own.config(cfg))
        assert {one: again.modules[one].size for one in cfg.modules} == {
            one: layout.modules[one].size for one in cfg.modules
        }
        assert [edge.is_shared for edge in again.edges] == [edge.is_shared for edge in layout.edges]
        assert Candidate.of(own.config(cfg), 8).together == own.together == (first_ranks in overrides)


def test_encoders_of_which_some_share_ranks():
    cfg = load("mixed_tiny", "run.device=cpu")
    cfg.modules = {"details": from_dict(to_dict(cfg)).modules["images"], **cfg.modules}
    firsts = {"details": 0, "images": 0, "audio": 1, "language": 2}
    cfg.placement = replace(cfg.placement, mode="disjoint", first_rank=firsts)
    assert Candidate.of(cfg, 8) is None and advice_of(run_of(cfg), ROWS, {}) is None
    cfg.placement.first_rank = {"details": 0, "images": 1, "audio": 2, "language": 3}
    assert Candidate.of(cfg, 8) is not None


@pytest.mark.parametrize("name", ["vlm_digits", "gpt_tiny"])
def test_what_is_left_out_could_not_be_better(name):
    """The bound from FLOPs alone is below the other one."""
    cfg = load(name)
    request = Request(4, 8, advice.DEVICES["h100"], ROWS, dict.fromkeys(cfg.encoders, 1.0))
    found = _Search(cfg, request)
    options = [*found._options()]
    assert len(options) > 20
    for option in options:
        assert 0 < found._least(option) <= found._bound(found._alone(option))


@settings(max_examples=30)
@given(
    images=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3])),
    language=st.tuples(*[st.sampled_from([1, 1, 2])] * 3, st.sampled_from([1, 2, 3])),
    mode=st.sampled_from(["disjoint", "shared"]),
    device=st.sampled_from(["cpu", "cuda", "auto"]),
    batch=st.sampled_from([6, 8, 24, 32]),
    micro=st.sampled_from([1, 2, 4]),
    more=st.sampled_from([
        {}, {"modules.images.balance": "patches"}, {"train.recompute": "selective"}, {"data.pack": True},
        {"modules.images.freeze": ["encoder"]}, {"modules.language.freeze": ["llm"]}, {"modules.language.lora.rank": 4},
        {"optim.distributed_optimizer": False}, {"placement.ranks_per_node": 2},
        {"modules.language.llm.dropout": 0.1}, {"modules.images.freeze_until": {"encoder": 9}},
        {"modules.language.llm.num_experts": 4, "modules.language.llm.experts_per_token": 2,
         "modules.language.llm.bias": False},
    ]),
)  # fmt: skip
def test_what_is_proposed_passes_the_check(images, language, mode, device, batch, micro, more):
    layouts = {
        **{f"modules.images.layout.{axis}": size for axis, size in zip(("tp", "pp", "dp"), images, strict=True)},
        **{f"modules.language.layout.{axis}": s for axis, s in zip(("tp", "pp", "cp", "dp"), language, strict=True)},
    }
    values = {"train.global_batch_size": batch, "train.micro_batch_size": micro, "run.device": device}
    cfg = changed(values | layouts | more | {"placement.mode": mode, "modules.language.llm.vocab_size": ROWS})
    report = check(cfg, without_data=True)
    assume(not report.faults)
    run = run_of(cfg)
    found = advice_of(run, ROWS, {})
    assert [note for note in report.notes if SAID in note] or found is None
    event("named" if found else "not named")
    if found is None:
        return
    assert run.layout.world_size > 1 and found.better.candidate.world_size <= found.own.gpus
    assert found.better.prediction.seconds < (1 - WORTH) * found.now.seconds
    chosen = found.better.candidate.config(cfg)
    again = check(chosen, without_data=True)
    assert not again.faults and not any(SAID in note for note in again.notes)
