"""The work of each microbatch in a step of the data, relative to a step of the largest samples."""

import numpy as np
import pytest

from data.order.step import StepSamples
from mimo_train.estimate.devices import DEVICES, Links
from mimo_train.estimate.flops import AT_THE_END, StepFlops
from mimo_train.inputs.padding import padding_of
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.costs import Costs
from mimo_train.preflight.plan.counts import Counts, KnownStep, steps_at_hand
from mimo_train.preflight.plan.predict import Predictor
from mimo_train.preflight.plan.search import Request, plan
from tests.tars import write_tar
from tests.unit.configs import load
from tests.unit.data.helpers import chat, encode_image

ROWS, MEDIA = 384, {"images": 1.0}
BATCH = ("train.global_batch_size=16", "train.micro_batch_size=2", "data.sequence_length=128")


def step_of(cfg, lengths: list[int], drawn_images: list[int]) -> KnownStep:
    """Return a step whose samples have these numbers of tokens, and of images of the largest size."""
    module, number = cfg.modules["images"], np.array(drawn_images, dtype=np.int64)
    tokens = module.encoder.most_inner_tokens(module.projector.merge)
    rows = module.encoder.most_tokens(module.projector.merge)
    found = {"tokens": rows, "loads": tokens, "pairs": tokens**2}
    return KnownStep(0, StepSamples(**{key: {"images": each * number} for key, each in found.items()},
                                    lengths=np.array(lengths, dtype=np.int64)))  # fmt: skip


def candidate(cfg, shared: bool = True, **images: int) -> Candidate:
    layouts = {name: module.layout for name, module in cfg.modules.items()}
    layouts["images"] = type(layouts["images"])(**images)
    return Candidate(layouts, frozenset({"images"} if shared else ()), False, cfg.train.micro_batch_size, "none",
                     cfg.optim.distributed_optimizer, 0, 8)  # fmt: skip


@pytest.mark.parametrize("pad", ["sequence", "microbatch"])
def test_the_largest_samples_are_what_costs_are_of(pad):
    cfg = load("vlm_digits", *BATCH, f"data.pad={pad}", "modules.language.layout.dp=2")
    counts = Counts(cfg, ROWS, MEDIA, [step_of(cfg, [128] * 16, [1] * 16)])
    (loads,) = counts.loads(candidate(cfg, dp=2))
    for name in ("images", "language"):
        assert loads[name].shares == pytest.approx((1.0,) * 4), name
        assert loads[name].total == pytest.approx(4)


def test_texts_and_images_count_as_they_are():
    cfg = load("vlm_digits", *BATCH, "data.pad=microbatch", "modules.language.layout.dp=1")
    lengths, drawn_images = [16 * (1 + at % 8) for at in range(16)], [at % 3 for at in range(16)]
    (loads,) = Counts(cfg, ROWS, MEDIA, [step_of(cfg, lengths, drawn_images)]).loads(candidate(cfg, dp=1))
    assert len(loads["language"].shares) == len(loads["images"].shares) == 8
    # The longest first, two of a length in a microbatch.
    flops = StepFlops(cfg, ROWS)
    of_rows = [flops.of_texts({16 * rows: 2}, AT_THE_END).hardware for rows in range(8, 0, -1)]
    assert loads["language"].shares == pytest.approx([own / of_rows[0] for own in of_rows])
    in_order = np.argsort(-np.array(lengths), kind="stable")
    in_pairs = np.array(drawn_images)[in_order].reshape(8, 2).sum(axis=1) / 2
    assert loads["images"].shares == pytest.approx(in_pairs.tolist())
    assert padding_of(cfg) is not None


def test_the_data_parallel_rank_with_the_most_counts():
    cfg = load("vlm_digits", *BATCH, "data.pad=sequence", "modules.language.layout.dp=2")
    step = step_of(cfg, [128] * 16, [3, 0, 0, 0] * 4)
    (loads,) = Counts(cfg, ROWS, MEDIA, [step]).loads(candidate(cfg, shared=False, dp=4))
    assert loads["images"].shares == (3.0,) * 4, "a rank has one sample of each microbatch, the first always images"
    cfg.modules["images"].balance = "patches"
    (loads,) = Counts(cfg, ROWS, {"images": 3.0}, [step]).loads(candidate(cfg, shared=False, dp=2))
    assert loads["images"].total == pytest.approx(4 * 3 / 6)


def test_packs_are_as_many_as_the_lengths_make():
    cfg = load("vlm_digits", *BATCH, "data.pack=true", "modules.language.layout.dp=1")
    step = step_of(cfg, [32] * 16, [1] * 16)
    (loads,) = Counts(cfg, ROWS, MEDIA, [step]).loads(candidate(cfg, dp=1))
    # Two rows of 256 tokens hold 16 samples of 32; their attention is that of 32 tokens.
    assert len(loads["language"].shares) == 2 and loads["images"].total == pytest.approx(8)
    assert 1.5 < loads["language"].total < 2
    (loads,) = Counts(cfg, ROWS, MEDIA, [step]).loads(candidate(cfg, shared=False, dp=2))
    assert loads["images"].total == pytest.approx(8), "the same share of half as much"


def test_long_packs_are_as_many_samples_as_fit():
    cfg = load("vlm_digits", *BATCH, "data.pack=true", "data.pack_length=512", "modules.language.layout.dp=1")
    (loads,) = Counts(cfg, ROWS, MEDIA, [step_of(cfg, [128] * 16, [1] * 16)]).loads(candidate(cfg, dp=1))
    for name in ("images", "language"):
        assert loads[name].total == pytest.approx(4), name


@pytest.mark.parametrize("rows", ["data.pad=microbatch", "data.pack=true"])
def test_the_bound_of_several_steps_is_below_what_is_predicted_of_them(rows):
    cfg = load("vlm_digits", *BATCH, rows, "modules.language.layout.pp=2")
    steps = [
        step_of(cfg, [8 * (1 + at * at % 16) for at in range(16)], [at % number for at in range(16)])
        for number in (1, 2, 4)
    ]
    steps.append(step_of(cfg, [16] * 16, [1] * 16))
    links = Links(DEVICES["l40s"], 8)
    one = Predictor(cfg, Costs({"none": cfg}, ROWS, MEDIA, links, None), links, Counts(cfg, ROWS, MEDIA, steps))
    for chosen in (candidate(cfg, dp=1), candidate(cfg, shared=False, dp=1), candidate(cfg, shared=False, dp=2)):
        least, predicted = one.least_seconds(chosen), one.predict(chosen).seconds
        assert 0.3 * predicted < least <= predicted * (1 + 1e-9)


def shards(folder, texts: list[str]):
    members = []
    for number, text in enumerate(texts):
        members += [(f"{number:03d}.png", encode_image(8, 8)), (f"{number:03d}.json", chat("<image>?", text))]
    write_tar(folder / "s-000000.tar", members)
    return folder


def test_steps_are_predicted_by_the_shards_that_are_there(tmp_path):
    folder = shards(tmp_path / "shards", ["a" * (4 + 50 * (at % 2)) for at in range(40)])
    cfg = load("vlm_digits", *BATCH, f"data.shards={folder}", "data.demo=")
    steps, missing = steps_at_hand(cfg)
    assert not missing and [step.first for step in steps] == [0, 16]
    assert all(len(step.samples.lengths) == 16 for step in steps)

    def seconds(*known):
        found = plan(cfg, Request(2, 8, DEVICES["l40s"], ROWS, MEDIA, top=1, steps=known))
        return found.proposals[0].prediction.seconds

    assert seconds(*steps) < 0.95 * seconds()


def test_what_cannot_be_read_is_said(tmp_path):
    cfg = load("vlm_digits", *BATCH, f"data.shards={tmp_path}/none", "data.demo=")
    steps, missing = steps_at_hand(cfg)
    assert steps == () and "no such file or folder" in missing
    cfg.data.shards = ""
    assert steps_at_hand(cfg) == ((), "data.shards is empty")
