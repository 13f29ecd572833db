"""Models of several parts with adapters of PEFT: its logits are ours, beside the weights and inside them, and what
comes in goes out bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from mimo_train.layout.run import resolve
from tests.dist.hf.test_adapters import adapter, export
from tests.dist.models.composites import logits_of, make
from tests.dist.models.test_composites import composed, predicted
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps

BOUND = 1e-5
"""Largest difference, of the largest value that is expected."""
APART = "layout=two_processes"
BOTH = ("images", "language")
MADE = {
    "qwen2_5_vl": (
        {"use_dora": True, "target_modules": r".*s\.\d+\..*\.(\w+_proj|qkv|attn\.proj)|.*merger\.mlp\.[02]"},
        (APART, "modules.language.layout.pp=2"),
    ),
    "qwen3_vl": (
        {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj", "qkv", "linear_fc1"],
         "exclude_modules": ".*deepstack.*"},
        ("layout=one_process", *(f"modules.{name}.layout.tp=2" for name in BOTH)),
    ),
    # Of its tower the last layer is not read, and has an adapter all the same.
    "llava_next": ({"target_modules": ["q_proj", "v_proj"]}, ("layout=one_process",)),
}  # fmt: skip
"""Adapters that peft makes, and the layout on which they start."""
OWN = ("modules.language.lora.rank=4", "modules.images.lora.rank=2", "modules.images.lora.alpha=5")
OWN += ("modules.images.lora.targets=[linear_qkv,'input_projections*']",)


def with_peft(model: Path, folder: Path, options: dict | None = None) -> list[np.ndarray]:
    """Logits of peft with the adapter in `folder`, which with `options` it makes there."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager")
    if options is None:
        adapted = PeftModel.from_pretrained(base, folder)
        stored = {name.replace(".default", "") for name in adapted.state_dict() if ".lora_" in name}
        assert stored == adapter(folder).keys()
        return logits_of(adapted, model)
    torch.manual_seed(2)
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.04)
        if "magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape)
    adapted.save_pretrained(folder)
    return logits_of(adapted, model)


def ours(cfg, drawn: bool) -> dict:
    """On a rank: logits with adapters, drawn here or as the run starts; a checkpoint; logits with merged adapters."""
    import torch

    from mimo_train.models.lora.adapters import merge_lora
    from mimo_train.training.step.batches import StepIterator, open_loader

    steps = Steps(cfg)
    pipeline, dataset = steps.pipeline, steps.session.data.dataset
    for name, parameter in pipeline.model[0].named_parameters() if drawn else ():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.04)
    iterator = StepIterator(open_loader(resolve(cfg), pipeline.groups, dataset, consumed=0, steps=1), pipeline)
    iterator.advance()
    language = pipeline.groups.collections.get("language")
    found = {"tp": language.tp.rank() if language else 0, "beside": predicted(pipeline, iterator)}
    found["checkpoint"] = steps.save()
    merge_lora(pipeline.model)
    iterator.rewind()
    return found | {"merged": predicted(pipeline, iterator)}


def require_same_logits(ranks: list[dict], key: str, theirs: list[np.ndarray]) -> None:
    last = {rank["tp"]: rank[key] for rank in ranks if rank[key] is not None}
    logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)
    for number, expected in enumerate(theirs):
        own = logits[number, : len(expected), : expected.shape[1]]
        assert np.abs(own - expected).max() < BOUND * np.abs(expected).max(), (key, number)


@pytest.mark.parametrize("kind", MADE)
def test_an_adapter_of_peft_in_all_parts_starts_a_run_with_its_logits(kind, tmp_path):
    options, layout = MADE[kind]
    folder, came = tmp_path / "model", tmp_path / "adapter"
    (bare,) = run_ranks(make, 1, tmp_path, kind)
    (theirs,) = run_ranks(with_peft, 1, folder, came, options)
    assert np.abs(theirs[0] - bare["logits"][0]).max() > 0.1, "the adapter changes what the model says"
    start = (f"modules.{name}.lora.adapter={came}" for name in BOTH)
    cfg = composed(tmp_path, tmp_path / "run", *layout, *start)
    ranks = run_ranks(ours, resolve(cfg).layout.processes[-1] + 1, cfg, False)
    require_same_logits(ranks, "beside", theirs)
    require_same_logits(ranks, "merged", theirs)
    export(ranks[0]["checkpoint"], tmp_path / "out")
    before, after = adapter(came), adapter(tmp_path / "out")
    assert before.keys() == after.keys() and all(value.equal(after[name]) for name, value in before.items())


def test_peft_loads_adapters_that_were_made_here_with_our_logits(tmp_path):
    """Of a LLaVA: beside whole fused layers, and beside the projector; two ranks and alphas."""
    (bare,) = run_ranks(make, 1, tmp_path, "llava_next")
    cfg = composed(tmp_path, tmp_path / "run", "layout=one_process", *OWN)
    ranks = run_ranks(ours, 1, cfg, True)
    export(ranks[0]["checkpoint"], tmp_path / "out")
    (theirs,) = run_ranks(with_peft, 1, tmp_path / "model", tmp_path / "out")
    assert np.abs(theirs[0] - bare["logits"][0]).max() > 0.1
    require_same_logits(ranks, "beside", theirs)
    require_same_logits(ranks, "merged", theirs)
