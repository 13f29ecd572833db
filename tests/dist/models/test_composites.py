"""A whole Qwen-VL or LLaVA of tiles computes, learns and answers as in transformers, at any layout, and comes back bit
for bit."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from tests.dist.models.composites import (
    CLIP,
    DECAY,
    EPSILON,
    NEW_TOKENS,
    RATE,
    SAMPLES,
    STEPS,
    content,
    exported,
    file_of,
    hub_name,
    make,
    samples_of,
)
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps, whole

BOUND = 1e-5
"""Largest difference, of the largest value that is expected."""
LATER_BOUND = 1e-4
"""As BOUND, of gradient norms after the first step: rounding errors of a step move all that follow."""
ONE = ("layout=one_process", "train.micro_batch_size=1")
"""One sample in a microbatch, as where answers are decoded."""
APART = "layout=two_processes"


def _of(names: str, *sizes: str) -> tuple[str, ...]:
    """Sizes of the layouts of modules."""
    return tuple(f"modules.{name}.layout.{size}" for name in names.split() for size in sizes)


UNBALANCED = "modules.language.llm.router_balancing=none"
SHARED, BOTH = "layout=one_process", "images language"
LAYOUTS = {
    "qwen2_5_vl": {
        "one process": ONE,
        "pp2": (APART, *_of("images", "dp=2"), *_of("language", "pp=2"), "data.pack=true"),
        "tp2 pp2": (SHARED, *_of(BOTH, "tp=2"), *_of("language", "pp=2")),
        "split": (APART, *_of("images", "pp=2"), *_of("language", "cp=2")),
    },
    "qwen3_vl": {
        "one process": (*ONE, "train.recompute=full"),
        "tp2": (SHARED, *_of(BOTH, "tp=2", "sp=true")),
        "pp2": (APART, *_of("images", "dp=2"), *_of("language", "pp=2"), "modules.images.balance=images"),
        "tp2 pp2": (SHARED, *_of(BOTH, "tp=2"), *_of("language", "pp=2")),
        "split": (APART, *_of("language", "cp=2"), "data.pack=true"),
    },
    # Its balancing loss is off by default in transformers.
    "qwen3_vl_moe": {
        "pp2": (SHARED, *_of("language", "pp=2"), UNBALANCED, "data.pack=true"),
        "tp2 pp2": (SHARED, *_of(BOTH, "tp=2", "sp=true"), *_of("language", "pp=2", "ep=2", "etp=1"), UNBALANCED),
    },
    "llava_next": {
        "one process": ONE,
        # A tile has 17 tokens in its encoder, the class token among them, which two ranks cannot share.
        "tp2": (SHARED, *_of("images", "tp=2"), *_of("language", "tp=2", "sp=true")),
        "pp2": (APART, *_of(BOTH, "pp=2")),
        "tp2 pp2": (APART, *_of("images", "dp=2"), *_of("language", "tp=2", "pp=2")),
    },
    "llava_onevision": {
        "one process": ONE,
        "pp2": (APART, *_of(BOTH, "pp=2")),
        "tp2 pp2": (APART, *_of(BOTH, "tp=2", "pp=2")),
    },
}


CHECKPOINTS = {"pp2": "before", "tp2 pp2": "after"}
"""Of the step, by the layouts whose checkpoints are exported."""


def on(*layouts: str) -> pytest.MarkDecorator:
    """Every family on these of its layouts, or on all."""
    cases = [(kind, name) for kind, own in LAYOUTS.items() for name in own if not layouts or name in layouts]
    return pytest.mark.parametrize("trained", cases, indirect=True, ids="-".join)


class Trained(NamedTuple):
    """A model of a family on a layout."""

    kind: str
    layout: str
    folder: Path
    """Of the model and its samples."""
    expected: dict[str, Any]
    """What transformers makes of them."""
    ranks: list[dict[str, Any]]
    """What each rank has found."""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Makes a family's model once: (folder, what transformers makes of its samples)."""

    @functools.cache
    def made(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, run_ranks(make, 1, folder, kind)[0]

    return made


@pytest.fixture(scope="module")
def trained(request, published, tmp_path_factory) -> Trained:
    kind, layout = request.param
    folder, expected = published(kind)
    cfg = composed(folder, tmp_path_factory.mktemp("run"), *LAYOUTS[kind][layout])
    question = samples_of(kind)[0][0]
    ranks = run_ranks(train, resolve(cfg).layout.processes[-1] + 1, cfg, question)
    return Trained(kind, layout, folder, expected, ranks)


def composed(folder: Path, run_dir: Path, *overrides: str, name: str = "vlm_digits"):
    values = {
        "run.dir": run_dir, "pretrained": folder / "model", "data.shards": folder / "samples.tar", "data.demo": "",
        "data.validation_shards": "", "data.shuffle": "false", "data.sequence_length": 240, "data.workers": 0,
        "train.iters": STEPS, "train.global_batch_size": len(SAMPLES), "train.micro_batch_size": 2,
        "train.eval_interval": 0, "optim.lr": RATE, "optim.min_lr": RATE, "optim.warmup_iters": 0,
        "optim.decay": "constant", "optim.eps": EPSILON, "optim.weight_decay": DECAY,
        "optim.clip_grad": CLIP, "optim.beta1": 0.9,
        "optim.beta2": 0.95, "checkpoint.save_interval": 0, "log.tensorboard": "false",
    }  # fmt: skip
    return load(name, [*(f"{key}={value}" for key, value in values.items()), *overrides])


def train(cfg, question: list = SAMPLES[0][0]) -> dict:
    """On a rank: logits of all samples, ids and positions, then (loss, gradient norm) of all steps; with checkpoints
    before and behind them."""
    import torch

    from mimo_train.estimate.parameters import embedding_rows, module_parameters
    from mimo_train.models.parameters import modules_of
    from mimo_train.training.step.batches import StepIterator, open_loader

    steps = Steps(cfg)
    pipeline, dataset = steps.pipeline, steps.session.data.dataset
    language = pipeline.groups.collections.get("language")
    found: dict = {"tp": language.tp.rank() if language else 0}
    for name, chunks in modules_of(steps.model).items():
        tp, pp = (getattr(pipeline.groups.collections[name], axis) for axis in ("tp", "pp"))
        layout = cfg.modules[name].layout
        place = {"tp": tp.size(), "stage": pp.rank(), "stages": pp.size(), "ep": layout.ep, "etp": layout.etp}
        counted = module_parameters(cfg, name, embedding_rows(cfg.llm, 0), **place)
        own = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert own == sum(part.total for part in counted.values()), name
    if pipeline.layout.processes == (0,):
        found["answer"] = answer(cfg, steps, question)

    iterator = StepIterator(open_loader(resolve(cfg), pipeline.groups, dataset, consumed=0, steps=1), pipeline)
    iterator.advance()
    found["items"] = [read["images"].get(0, []) for read in iterator.current.numbers if "images" in read]
    logits = predicted(pipeline, iterator)
    if logits is not None:
        found["logits"] = logits
    if language:
        batches = iterator.current.microbatches
        found["ids"] = torch.cat([batch["input_ids"] for batch in batches]).numpy()
        found["positions"] = torch.cat([batch["position_ids"] for batch in batches], dim=-2).numpy()
    found["before"] = steps.save()
    found["curve"] = steps.train(cfg.train.iters)
    found["after"] = steps.save()
    return found


def predicted(pipeline, iterator) -> np.ndarray | None:
    """Logits of the samples of a step [B, S, V of this rank]; None on ranks that have none."""
    import torch

    from mimo_train.parallel.context import gather_sequence
    from mimo_train.training.step.forward_step import MODEL_INPUTS

    def predict(iterator, model):
        batch = next(iterator)
        inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch and key not in ("labels", "loss_mask")}
        output = model(**{"input_ids": None, "attention_mask": None} | inputs)
        return output[0] if isinstance(output, tuple) else output, lambda output, non_loss_data: output

    with torch.no_grad():
        logits = pipeline.run(predict, iterator, forward_only=True, collect_non_loss_data=True)
    if not logits:
        return None
    cp = pipeline.groups.collections["language"].cp
    parts = [gather_sequence(part.transpose(0, 1).contiguous(), cp) for part in logits]
    return torch.cat(parts, dim=1).transpose(0, 1).numpy()


def answer(cfg, steps, parts: list) -> list[int]:
    """The greedy answer to a question, with the cache of keys and values."""
    import tempfile

    from data.records.conversation import Part, Turn
    from mimo_train.evaluation.generation.answers import Answers
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.evaluation.generation.prompts import Prompts

    tokenizer = steps.session.parts.tokenizer
    prompts, media = Prompts(cfg, tokenizer), []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            if isinstance(part, tuple):
                (Path(folder) / "file").write_bytes(file_of(part))
                media.append(prompts.medium(content([part])[0]["type"], Path(folder) / "file"))
    turn = Turn("user", tuple(Part(part["type"], part.get("text", "")) for part in content(parts)))
    answers = Answers(cfg, Decoder(steps.pipeline), tokenizer, Sampling(), NEW_TOKENS)
    found = answers(prompts.of_conversation([turn], media)).tokens
    steps.pipeline.model[0].train()
    return found


@on()
def test_logits_losses_and_gradients_are_those_of_transformers(trained):
    expected, ranks = trained.expected, trained.ranks
    last = {rank["tp"]: rank["logits"] for rank in ranks if "logits" in rank}
    logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)
    for number, theirs in enumerate(expected["logits"]):
        assert _difference(logits[number, : len(theirs), : theirs.shape[1]], theirs) < BOUND, number
    curve = [point for _, *point in whole([rank["curve"] for rank in ranks])]
    differences = np.abs(np.array(curve) / expected["curve"] - 1)
    assert (differences < (BOUND, LATER_BOUND)).all() and differences[0].max() < BOUND


@on()
def test_tokens_and_positions_are_those_of_transformers(trained):
    expected = trained.expected
    for rank in trained.ranks:
        for number in range(len(SAMPLES) if "ids" in rank else 0):
            ids = expected["ids"][number]
            assert rank["ids"][number, : len(ids)].tolist() == ids
            if not expected["positions"]:
                continue
            positions = expected["positions"][number]
            assert (rank["positions"][:, number, : len(ids)] == positions).all()
            behind = rank["positions"][:, number, len(ids) :]
            assert (behind == positions.max() + 1 + np.arange(behind.shape[1])).all(), "what an answer continues"


@pytest.mark.parametrize("trained", [("qwen3_vl", "pp2")], indirect=True)
def test_frames_of_a_video_are_divided_over_ranks(trained):
    """The first sample has an image, three times of a video, and an image."""
    read = [sum(rank["items"], []) for rank in trained.ranks if rank["items"]]
    assert sorted(sum(read, [])) == [0, 1, 2, 3, 4] and all({1, 2, 3} & {*items} for items in read)


@on("one process")
def test_greedy_answers_are_those_of_transformers(trained):
    answer = trained.ranks[0]["answer"]
    assert answer == trained.expected["answer"] and len(set(answer)) > 3


@on(*CHECKPOINTS)
def test_what_comes_in_goes_out_bit_for_bit_and_what_was_learned_as_transformers_learns_it(trained, tmp_path):
    kind, layout, folder, expected, ranks = trained
    (found,) = run_ranks(exported, 1, ranks[0][CHECKPOINTS[layout]], tmp_path / "out")
    assert found["keys"] == []
    if layout == "pp2":
        before, after = tensors(folder / "model"), tensors(tmp_path / "out")
        assert after.keys() == {hub_name(name, kind) for name in before}
        assert all(value.tobytes() == after[hub_name(name, kind)].tobytes() for name, value in before.items())
        for ours, theirs in zip(found["logits"], expected["logits"], strict=True):
            assert (ours == theirs).all()
        return
    for name, value in expected["after"].items():
        assert np.abs(found["parameters"][name] - value).max() < 1e-2 * RATE, name


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
