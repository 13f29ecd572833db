"""Checkpoints of trained weights alone: small, exact, and refused over any other frozen weights."""

from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

WIDE = (
    "layout=one_process",
    "modules.language.llm.hidden_size=96",
    "modules.language.llm.ffn_hidden_size=384",
    "modules.language.lora.rank=2",
    "modules.language.lora.dora=true",
    "modules.language.lora.targets=[q_proj, '*.layers.1.*.linear_fc1']",
    "modules.images.freeze=[encoder]",
    "optim.decay=constant",
    "optim.warmup_iters=0",
)
TP2 = ("placement.mode=shared", "modules.images.layout.tp=2", "modules.language.layout.tp=2")


@pytest.fixture
def tiny(digits, tmp_path):
    def make(name: str, *overrides: str):
        return config("vlm_digits", tmp_path / name, digits, "train.iters=8", *WIDE, *overrides)

    return make


def _train(cfg, steps: int, saved_after: int = 0) -> tuple[list[tuple], str]:
    run = Steps(cfg)
    first = run.train(saved_after)
    return first + run.train(steps - saved_after), str(run.save()) if saved_after == steps else ""


def _train_on(cfg, steps: int, saved_after: int) -> tuple[list[tuple], str]:
    """As `_train`, with steps behind the checkpoint."""
    run = Steps(cfg)
    first, folder = run.train(saved_after), str(run.save())
    return first + run.train(steps - saved_after), folder


def _loss_of_merged(cfg) -> float | None:
    """Loss of the next step with the adapters in the weights, and A, B and magnitudes that change nothing."""
    from mimo_train.models.lora.adapters import merge_lora

    run = Steps(cfg)
    merge_lora(run.model)
    assert not any(value.any() for name, value in run.parameters().items() if name.endswith("lora_b"))
    return run.train(1)[0][0]


def _size(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def test_a_run_continues_from_trained_weights_alone_at_another_layout(tiny):
    only = "checkpoint.trained_only=true"
    ((_, base),) = run_ranks(_train_on, 1, tiny("base", "modules.language.lora.rank=0", "run.seed=7"), 1, 1)
    weights = f"checkpoint.weights={base}"
    ((straight, full),) = run_ranks(_train_on, 1, tiny("whole", weights), 4, 2)
    ((first, small),) = run_ranks(_train_on, 1, tiny("small", weights, only), 2, 2)
    assert first == straight[:2]
    (((plain,), _),) = run_ranks(_train, 1, tiny("plain", weights, "modules.language.lora.rank=0"), 1)
    # Magnitudes are those of the weights that were loaded; adapters take another way to the same sums.
    assert plain[0] == pytest.approx(straight[0][0], rel=1e-6)
    left_out = folders.read_record(Path(small))["left_out"]
    assert "left_out" not in folders.read_record(Path(full))
    assert _size(small) < _size(full) / 2, (_size(small), _size(full))
    # Without `checkpoint.weights` it is that of the run that wrote it; tensor parallelism changes no fingerprint.
    ranks = run_ranks(_train_on, 2, tiny("two", f"checkpoint.resume={small}", only, *TP2), 2, 2)
    again = [(step + 2, *point) for step, *point in whole([curve for curve, _ in ranks])]
    assert max(largest_difference(whole([straight])[2:], again)) < TOLERANCE
    assert folders.read_record(Path(ranks[0][1]))["left_out"] == left_out
    # A new run may start from it, too: the base first, then what was trained.
    (((of_small,), _),) = run_ranks(_train, 1, tiny("next", f"checkpoint.weights={small}"), 1)
    # Merged, on two tensor-parallel ranks, what was saved whole gives the same.
    merged = run_ranks(_loss_of_merged, 2, tiny("merged", f"checkpoint.weights={full}", *TP2))
    assert max(loss for loss in merged if loss is not None) == pytest.approx(of_small[0], rel=1e-6)


def test_another_base_is_refused_with_both_fingerprints(tiny):
    only = "checkpoint.trained_only=true"
    ((_, small),) = run_ranks(_train, 1, tiny("small", only), 1, 1)
    was = folders.read_record(Path(small))["left_out"]
    with pytest.raises(RankFailure) as failure:
        run_ranks(_train, 1, tiny("other", f"checkpoint.weights={small}", "run.seed=99"), 1)
    message = str(failure.value)
    assert "run.seed: checkpoint " in message and "the frozen weights differ from those of its run" in message
    assert f"expected {was}). Its run took them from run.seed=1234: restore" in message
    assert message.count(was.split()[0]) >= 2


def _fingerprints(cfg) -> list[str]:
    """Of the frozen weights as they are, with one element of one changed in its last bit, and with the same weight of
    two layers exchanged."""
    import torch

    from mimo_train.checkpoint.frozen_base import fingerprint, is_frozen
    from mimo_train.checkpoint.local_shards import shards_of_model
    from mimo_train.models.parameters import global_names, modules_of

    run = Steps(cfg)

    def now() -> str:
        return fingerprint([one for one in shards_of_model(run.model) if is_frozen(one, run.optimizer.releases)])

    (language,) = modules_of(run.model)["language"]
    names, found = global_names(language), [now()]
    first, second = (names[f"decoder.layers.{layer}.mlp.linear_fc2.weight"].data for layer in (0, 1))
    first[1, 2] = torch.nextafter(first[1, 2], torch.tensor(9.0))
    found.append(now())
    first[1, 2] = torch.nextafter(first[1, 2], torch.tensor(-9.0))
    copy = first.clone()
    first.copy_(second)
    second.copy_(copy)
    found.append(now())
    second.copy_(first.clone())
    first.copy_(copy)
    return [*found, now()]


def test_a_fingerprint_sees_one_bit_and_two_layers_exchanged(tiny):
    (found,) = run_ranks(_fingerprints, 1, tiny("run"))
    assert found[0] == found[-1] and len({*found}) == 3


def test_adapters_that_a_model_has_not_are_not_lost(tiny):
    ((_, folder),) = run_ranks(_train, 1, tiny("adapted"), 1, 1)
    with pytest.raises(RankFailure, match="so that its adapters would be lost"):
        run_ranks(_train, 1, tiny("plain", "modules.language.lora.rank=0", f"checkpoint.weights={folder}"), 1)


def _told(source, cfg) -> list[list[str]]:
    """Modules that a new run, and then its next start, say they have taken from another run."""
    Steps(source).save()
    told = []
    for _ in range(2):
        run = Steps(cfg)
        told.append([loaded.module for loaded in run.session.checkpointer.loaded])
        run.save()
        run.session.close()
    return told


def _raised(cfg: ConfigContainer) -> str:
    with pytest.raises(UserError) as raised:
        Steps(cfg)
    return str(raised.value)


def test_only_a_new_run_tells_of_modules_that_it_takes(tiny):
    """A run that continues reads them again, for what its checkpoint leaves out, and takes nothing new; from its own
    checkpoints none takes what they leave out."""
    source = tiny("source", "modules.language.lora.rank=0", "run.seed=7")
    modules = f"checkpoint.load_modules.language.path={source.run.dir}"
    run = tiny("run", modules, "checkpoint.trained_only=true")
    ((first, again),) = run_ranks(_told, 1, source, run)
    assert first == ["language"] and again == []
    (raised,) = run_ranks(_raised, 1, tiny("third", modules.replace(str(source.run.dir), str(run.run.dir))))
    assert raised.startswith("checkpoint.load_modules.language: checkpoint ") and "trained weights only" in raised
    assert "load_modules.language.only, or give a whole one" in raised
