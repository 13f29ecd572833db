"""The engine: steps of the training loop, log-probabilities, weights under their names in the hub, memory, checkpoints
and answers, at several layouts."""

from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config

LLM = "modules.language.llm"
LAYOUTS = {
    # ranks, overrides
    "one": (1, ("layout=one_process",)),
    "dp2": (2, ("layout=one_process", "modules.language.layout.dp=2", "modules.images.layout.dp=2", "data.pack=true",
                "train.logits=learned")),
    "tp2, images dp2": (2, ("layout=one_process", "modules.language.layout.tp=2", "modules.language.layout.sp=true",
                            "modules.images.layout.dp=2")),
    "pp2": (2, ("layout=one_process", "modules.language.layout.pp=2")),
}  # fmt: skip


def batch_of(session, size: int):
    """The first samples of a run as prompts and answers."""
    from data.collate import collate_media
    from mimo_train.engine.batch import Batch
    from mimo_train.evaluation.generation.prompts import Prompt

    dataset, prompts, answers, learned = session.data.dataset, [], [], []
    for number in range(size):
        text, _ = dataset.read_text(number)
        places = text.loss_mask.nonzero()[0].tolist()
        begin, end = places[0] + 1, places[-1] + 2
        ids = [*text.input_ids[:begin].tolist(), *text.labels[begin - 1 : end - 1].tolist()]
        arguments = collate_media(dataset.read_media(number, "images")[0], "pixels")
        inputs = {"images": None if arguments is None else {"images": arguments}}
        placeholder = session.parts.tokenizer.placeholder_id("<image>")
        prompts.append(Prompt(ids[:begin], inputs, {"images": ids.count(placeholder)}))
        answers.append(ids[begin:])
        # Turns of the user between those of the assistant.
        learned.append(text.loss_mask[begin - 1 : end - 1].tolist())
    return Batch(prompts, answers, {"learned": learned})


def sft(log_probs, tensors):
    mask = tensors["learned"].reshape(-1)
    loss = (-log_probs.reshape(-1) * mask).sum()
    return loss, mask.sum().int(), {"lm loss": (loss.detach(), mask.sum())}


def exercised(cfg, folder: Path, layout: str):
    """Compare an engine with a training loop of the same layout; returns what other layouts must have too."""
    import dataclasses

    import torch

    from mimo_train.config.errors import UserError
    from mimo_train.engine.engine import Engine
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.models.parameters import modules_of
    from tests.dist.steps import Steps

    def parameters(model) -> list[torch.Tensor]:
        return [
            parameter.detach().clone()
            for chunks in modules_of(model).values()
            for chunk in chunks
            for parameter in chunk.parameters()
        ]

    def same(one, other) -> bool:
        return len(one) == len(other) > 0 and all(map(torch.equal, one, other))

    loop = Steps(cfg)
    batch = batch_of(loop.session, cfg.train.global_batch_size)
    points = loop.train(1)
    after_one = parameters(loop.model)
    loop.session.close()

    engine = Engine(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=f"{cfg.run.dir}_engine")))
    before = engine.log_probs(batch)
    assert [len(each) for each in before] == [len(answer) for answer in batch.answers]
    assert not torch.is_inference_mode_enabled() and engine.session.model[0].training
    start = parameters(engine.session.model)
    engine.offload()
    memory = [parameter.untyped_storage().nbytes() for parameter in engine.session.model[0].parameters()]
    assert not any(memory)
    with pytest.raises(UserError, match="log_probs: weights, gradients, optimizer are on the host"):
        engine.log_probs(batch)
    engine.onload(gradients=False)
    engine.onload()
    assert same(parameters(engine.session.model), start)

    report = engine.train(batch, sft)
    assert engine.step == 1 and report["grad_norm"] == points[0][1]
    if points[0][0] is not None:
        assert report["lm loss"] == points[0][0]
    assert same(parameters(engine.session.model), after_one), "the step of the loop, bit for bit"
    saved = engine.save()

    # A step with tensors of the batch, on part of a microbatch.
    few = dataclasses.replace(batch.part(0, 3), tensors={"advantages": [1.0, -0.5, 0.25], "old": before[:3]})

    def weighted(log_probs, tensors):
        mask = tensors["mask"]
        assert tensors.keys() == {"mask", "places", "samples", "advantages", "old"}
        assert bool(((tensors["samples"] >= 0) == (mask > 0)).all())
        loss = -((log_probs - tensors["old"]).exp() * tensors["advantages"] * mask).sum()
        return loss, mask.sum().int(), {"old": ((tensors["old"] * mask).sum(), mask.sum())}

    second = engine.train(few, weighted)
    tokens = torch.cat(before[:3])
    assert second["old"] == pytest.approx(float(tokens.mean()), rel=1e-5)
    once = parameters(engine.session.model)
    assert not same(once, after_one)
    engine.offload(weights=False)
    engine.onload()
    third = engine.train(few, weighted)
    engine.load(saved)
    assert engine.step == 1 and same(parameters(engine.session.model), after_one)
    assert engine.train(few, weighted) == second and same(parameters(engine.session.model), once)
    assert engine.train(few, weighted) == third
    engine.load(saved)

    weights = {name: value.numpy(force=True).copy() for name, value in engine.named_weights()}
    answers, drawn = [], Sampling(1.0, seed=4)
    if layout == "pp2":
        with pytest.raises(UserError, match="modules.language.layout.pp: is 2"):
            engine.generate(batch.prompts[:1])
    else:
        with pytest.raises(UserError, match="max_new_tokens: must be at least 1, is 0"):
            engine.generate(batch.prompts[:1], drawn, 0)
        answers = [each.learned for each in engine.generate(batch.prompts[:5], drawn, 6)]
        others = [each.learned for each in engine.generate(batch.prompts[:5], drawn, 6)]
        engine.load(saved)
        again = [each.learned for each in engine.generate(batch.prompts[:5], drawn, 6)]
        assert again == answers != others
    engine.generate_by = lambda prompts, sampling, most: [(len(prompts), sampling, most)]
    assert engine.generate(batch.prompts[:2], drawn, 3) == [(2, drawn, 3)]
    with pytest.raises(UserError, match="global_batch_size: is 8, the most samples of a step, and the batch has 9"):
        engine.train(batch.part(0, 9), sft)
    if layout == "one":
        with pytest.raises(UserError, match="answers: sample 1 has token 999999, and the vocabulary has "):
            engine.log_probs(type(batch)(batch.prompts[:2], [[1], [2, 999999]]))
        with pytest.raises(UserError, match="loss_function: its sum has no gradient"):
            engine.train(batch, lambda log_probs, tensors: (log_probs.detach().sum(), tensors["mask"].sum().int(), {}))
        with pytest.raises(UserError, match="loss_function: returned Tensor, expected"):
            engine.train(batch, lambda log_probs, tensors: log_probs.sum())
        with pytest.raises(TypeError, match="num_tokens of type torch.float32, expected whole numbers"):
            engine.train(batch, lambda log_probs, tensors: (log_probs.sum(), tensors["mask"].sum() / 2, {}))
    engine.close()
    return [each.tolist() for each in before], report, second, weights, answers, str(saved)


def exported(folder: str, to: Path) -> dict:
    """Tensors of an export, as arrays."""
    from safetensors.torch import load_file

    from data.storage.url import place_of
    from mimo_train.checkpoint.resume.same_run import recorded_config
    from mimo_train.evaluation.export import export

    place = place_of(folder)
    export(place, recorded_config(place, trust_code=False), to, dtype="fp32", largest_file=2**30, merge=False)
    files = sorted(to.rglob("*.safetensors"))
    several = len({file.parent for file in files}) > 1
    return {
        (f"{file.parent.relative_to(to)}/" if several else "") + name: value.numpy()
        for file in files
        for name, value in load_file(file).items()
    }


def test_an_engine_is_the_run_of_its_config_at_any_layout(digits, tmp_path):
    results = {}
    for layout, (ranks, overrides) in LAYOUTS.items():
        cfg = config(
            "vlm_digits",
            tmp_path / layout.replace(" ", "_").replace(",", ""),
            digits,
            "data.sequence_length=128",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            "train.iters=10",
            *overrides,
        )
        results[layout] = run_ranks(exercised, ranks, cfg, tmp_path, layout)
    (one,) = results["one"]
    (files,) = run_ranks(exported, 1, one[-1], tmp_path / "exported")
    assert files.keys() == one[3].keys()
    assert all((files[name] == one[3][name]).all() for name in files)
    for layout, of_ranks in results.items():
        for log_probs, report, second, weights, answers, _ in of_ranks:
            assert [value for row in log_probs for value in row] == pytest.approx(
                [value for row in one[0] for value in row], abs=1e-5
            ), layout
            assert report == pytest.approx(one[1], rel=1e-5) and second == pytest.approx(one[2], rel=1e-4), layout
            assert weights.keys() == files.keys()
            assert all(abs(files[name] - weights[name]).max() < 1e-5 for name in files), layout
            assert answers == (one[4] if layout != "pp2" else []), layout


def scored(cfg) -> tuple[list, dict]:
    """Log-probabilities of answers to texts, and the report of a step on them."""
    from mimo_train.engine.batch import Batch
    from mimo_train.engine.engine import Engine

    with Engine(cfg) as engine:
        prompts = [engine.prompts.of_text(text) for text in ("It was", "A", "The best of times")]
        answers = [[*b" the best"], [*b" b"], [*b", the worst of"]]
        batch = Batch(prompts, answers, {"learned": [[1.0] * len(answer) for answer in answers]})
        return [each.tolist() for each in engine.log_probs(batch)], engine.train(batch, sft)


def test_texts_have_equal_numbers_at_context_parallel_and_interleaved_layouts(prose, tmp_path):
    results = {}
    layouts = {"language_one": (1, ()), "language_cp2": (2, ()), "language_pp2_vpp2": (2, (f"{LLM}.num_layers=4",))}
    for layout, (ranks, overrides) in layouts.items():
        cfg = config(
            "gpt_tiny",
            tmp_path / layout,
            prose,
            f"layout={layout}",
            "data.sequence_length=32",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            *overrides,
        )
        results[layout] = run_ranks(scored, ranks, cfg)
    ((log_probs, report),) = results["language_one"]
    flat = [value for row in log_probs for value in row]
    for other, of_report in results["language_cp2"]:
        assert [value for row in other for value in row] == pytest.approx(flat, abs=1e-5)
        assert of_report == pytest.approx(report, rel=1e-5)
    # Of another model: a step's loss is the mean of the log-probabilities before it.
    for other, of_report in results["language_pp2_vpp2"]:
        values = [value for row in other for value in row]
        assert of_report["lm loss"] == pytest.approx(-sum(values) / len(values), rel=1e-5)
