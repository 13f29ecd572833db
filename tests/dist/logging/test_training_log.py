"""The line of a logging step, with every option on: against hand-computed values and one process."""

import re
from pathlib import Path

import pytest

from data.samples.text_lengths import TextLengths
from mimo_train.inputs.datasets import build_dataset, tokenizer_of
from mimo_train.logging.stopwatch import PARTS
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_on_ranks

EVERYTHING = (
    "log.metrics=[params_norm,grad_norms,num_zeros_in_grad,memory,straggler]",
    "log.throughput_window=2",
    "log.runtime_unit=seconds",
    "log.peak_tflops=1",
)
STEPS, INTERVAL = 6, 3
GPT_LAYOUTS = ("language_tp2", "language_pp2", "language_dp2")


def run(name: str, demo: Path, run_dir: Path, *overrides: str) -> list[dict]:
    """Lines of the log of 6 steps."""
    return train_on_ranks(config(name, run_dir, demo, f"train.iters={STEPS}", *overrides))


def lengths_of(cfg, samples: int):
    """Tokens of the first samples in the order of a run whose texts have been counted."""
    dataset = build_dataset(cfg, tokenizer_of(cfg))
    TextLengths(dataset).serve()
    return dataset.plan_step(0, samples).lengths


@pytest.fixture(scope="module")
def every_step(prose, tmp_path_factory) -> list[dict]:
    """Log of every step on one process, with every option."""
    return run("gpt_tiny", prose, tmp_path_factory.mktemp("log"), "layout=language_one", *EVERYTHING)


@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_an_interval_is_the_mean_of_its_steps_at_any_layout(layout, every_step, prose, tmp_path):
    lines = run("gpt_tiny", prose, tmp_path, f"layout={layout}", f"train.log_interval={INTERVAL}", *EVERYTHING)
    assert [line["step"] for line in lines] == [3, 6]
    for number, line in enumerate(lines):
        steps = every_step[INTERVAL * number : INTERVAL * (number + 1)]
        mean = sum(step["lm loss"] for step in steps) / INTERVAL
        assert line["lm loss"] == pytest.approx(mean, rel=1e-5)
        last = steps[-1]
        for name in ("grad_norm", "params_norm", "consumed_samples", "learning_rate/language"):
            assert line[name] == pytest.approx(last[name], rel=1e-5), name
        norms = {name: value for name, value in last.items() if name.startswith("l2_norm/grad/")}
        assert len(norms) > 10 and {name: line[name] for name in norms} == pytest.approx(norms, rel=1e-4)
        assert line["num_zeros"] == pytest.approx(last["num_zeros"], abs=2)


@pytest.mark.parametrize("layout", GPT_LAYOUTS)
def test_rates_follow_from_the_seconds_of_a_step(layout, prose, tmp_path):
    lines = run("gpt_tiny", prose, tmp_path, f"layout={layout}", *EVERYTHING)
    samples, lengths = lines[0]["consumed_samples"], lengths_of(config("gpt_tiny", tmp_path, prose), 6 * 16)
    assert len(set(lengths.tolist())) > 10, "texts of many lengths"
    for before, line in zip(lines, lines[1:], strict=False):
        tokens = int(lengths[before["consumed_samples"] : line["consumed_samples"]].sum())
        of_both = tokens + int(lengths[before["consumed_samples"] - samples : before["consumed_samples"]].sum())
        assert line["tokens_per_second"] == pytest.approx(tokens / line["step_seconds"])
        assert 0 < line["padding"] < 0.1
        two = before["step_seconds"] + line["step_seconds"]
        assert line["throughput/batches_per_sec"] == pytest.approx(2 / two, rel=1e-6)
        assert line["throughput/samples_per_sec"] == pytest.approx(2 * samples / two, rel=1e-6)
        assert line["throughput/device/tokens_per_sec"] == pytest.approx(of_both / 2 / two, rel=1e-6)
        assert line["time/samples"] == line["consumed_samples"]
        assert line["time/tokens"] == lengths[: line["consumed_samples"]].sum()
        # With a peak of 1 TFLOP/s, utilisation is the rate.
        assert line["mfu"] == pytest.approx(line["tflops"]) and line["hfu"] >= line["mfu"] > 0
        assert line["straggler/language/slowest_rank"] in (0, 1)
        assert line["straggler/language/slowest_over_median"] >= 1
        assert line["current_resident_mem"] > 0.05


@pytest.mark.parametrize("layout", ["two_processes", "images_dp1_language_dp2", "one_process"])
def test_the_parts_of_a_step_sum_to_the_step(layout, digits, tmp_path):
    lines = run("vlm_digits", digits, tmp_path, f"layout={layout}")
    parts = ("compute", "bubble", "bridge_wait", "data_wait", "reduce", "optimizer")
    apart = []
    for line in lines[1:]:
        sums = {name: sum(line[f"time/{name}/{part}"] for part in parts) for name in ("images", "language")}
        whole = [sum(sums.values())] if layout == "one_process" else list(sums.values())
        apart.append(max(abs(seconds / line["step_seconds"] - 1) for seconds in whole))
        assert line["time/images/compute"] > 0 and line["time/language/optimizer"] > 0
        assert line["tflops/images"] > 0 and line["tflops/language"] > 0
        if layout != "one_process":
            assert line["time/images/bridge_wait"] > 0 and line["time/language/bridge_wait"] > 0
    # The clock of the step's parts starts a little later than that of the step, on a busy machine a moment later.
    assert min(apart) < 0.2


def test_model_flops_do_not_depend_on_the_layout(digits, tmp_path):
    done = []
    for layout in ("one_process", "images_dp1_language_dp2"):
        run("vlm_digits", digits, tmp_path / layout, f"layout={layout}")
        progress = (tmp_path / layout / "progress.txt").read_text()
        done.append(re.findall(r"\tflops=(\S+)", progress)[-1])
    assert done[0] == done[1] and float(done[0]) > 1e6


def documented() -> dict[str, re.Pattern]:
    """Every key in the first column of the tables of docs/metrics.md that have a unit, with what it stands for."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| key \| unit \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    firsts = [line.split(" | ")[0] for row in rows for line in row.splitlines()]
    stands_for = {"MODULE": "(images|language)", "PARAMETER": r"[\w.]+", "PART": f"({'|'.join(PARTS)})"}
    stands_for |= {"NAME": "(one|other|more)", "LOSS": "loss of one's own", "METRIC": "accuracy"}

    def pattern(key: str) -> re.Pattern:
        return re.compile(re.sub("PARAMETER|METRIC|MODULE|PART|NAME|LOSS", lambda word: stands_for[word[0]], key))

    return {key: pattern(key) for first in firsts for key in re.findall("`([^`]+)`", first)}


def _rare_keys() -> list[str]:
    """What a run on the CPU in fp32 does not write."""
    from megatron.core.timers import Timers

    from mimo_train.logging.runtime import MEMORY_KEYS
    from mimo_train.training.log import StepNumbers, timer_seconds

    timers = Timers(log_level=2, log_option="minmax")
    timers("more").set_elapsed(1.0)
    numbers = StepNumbers(loss_scale=2.0, max_attention_logit=1.0)
    return [*MEMORY_KEYS.values(), *numbers.values(), *timer_seconds(timers, 1)]


def test_the_page_names_the_keys_that_are_logged_and_no_others(digits, tmp_path):
    own = ("modules.images.optim.projector_lr=1e-3", "train.eval_samples=8")
    held_out = (f"data.validation_shards={digits}/held_out", "layout=two_processes")
    held_out += (f"data.validation={{more: {{shards: {digits}/held_out}}}}", f"data.test_shards={digits}/held_out")
    held_out += (f"data.test={{more: {{shards: {digits}/held_out}}}}",)
    sources = ", ".join(f"{{shards: {digits}/train, name: {name}}}" for name in ("one", "other"))
    mixed = ("data.shards=", "data.demo=", f"data.mix=[{sources}]")
    lines = run("vlm_digits", digits, tmp_path, *EVERYTHING, *own, *held_out, *mixed)
    written = {key for line in lines for key in line}
    written |= set(*run_ranks(_rare_keys, 1))
    # Where nothing goes wrong, there are none of these.
    written |= {"skipped_iters", "bad_samples", "empty_steps", "nan_iters"}
    written |= {"eval/loss of one's own"}  # of a caller's loss function
    written |= {"eval/accuracy", "eval/more/accuracy"}  # of generated answers, with all modules on the same ranks
    written |= {f"imbalance{what}/language" for what in ("", "_tokens", "_attention")}  # of several data-parallel ranks
    keys = documented()
    assert len(keys) > 40
    assert [key for key, pattern in keys.items() if not any(map(pattern.fullmatch, written))] == []
    assert [key for key in written if not any(pattern.fullmatch(key) for pattern in keys.values())] == []


@pytest.mark.parametrize(("precision", "unfused", "named"), [("bf16", True, 1), ("bf16", False, 0), ("fp32", True, 0)])
def test_attention_without_a_fused_kernel_is_named_once(precision, unfused, named, prose, tmp_path):
    cfg = config("gpt_tiny", tmp_path, prose, "layout=language_one", "train.iters=2", f"train.precision={precision}")
    (printed,) = run_ranks(_printed, 1, cfg, unfused)
    assert printed.count("attention: Transformer Engine has no fused kernel") == named


def _printed(cfg, unfused: bool) -> str:
    """On a rank: what a run prints where Transformer Engine's attention has chosen its kernels."""
    import contextlib
    import io
    import sys
    from types import SimpleNamespace

    from mimo_train.training.pretrain import pretrain

    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    sys.modules[name] = SimpleNamespace(_attention_backends={"use_unfused_attention": unfused})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert pretrain(cfg) == 0
    return printed.getvalue()
