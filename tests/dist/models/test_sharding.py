"""`layout.fsdp`: classes of transformers sharded over two ranks train as on replicas, read and hold their rows alone,
and resume from and into any layout. `test_media_half` and `hf/test_as_is` compare them with transformers."""

from pathlib import Path

import pytest
import torch

from tests.dist.hf.test_as_is import AS_IS, COMMON, FAMILIES, run_of
from tests.dist.ranks import run_ranks

BOUND = 1e-5
TWO, FSDP = ("layout=language_dp2", "train.micro_batch_size=1"), "modules.language.layout.fsdp=true"
CASES = {
    # Tied tables, in several microbatches, with parts that are trained later, clipping and losses without logits.
    "whole": (
        "llama",
        (
            *("train.recompute=full", "train.max_logits_mib=0", "optim.ema=0.9", "optim.offload=true"),
            'modules.language.freeze_until={"*embed_tokens*": 2}',
        ),
    ),
    "adapters": ("cohere", ("modules.language.lora.rank=3", "modules.language.lora.targets=[q_proj,down_proj]")),
    "lion": ("llama", ("optim.name=lion", "optim.eps=1e-8", "optim.lr=1e-4")),
    "experts": ("gpt_oss", ("train.precision=bf16", "log.metrics=[grad_norms,params_norm]")),
}
STEPS = 4


def _make(root: Path) -> None:
    import transformers

    for kind, _ in CASES.values():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **COMMON | FAMILIES[kind])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)


def _train(cfgs: dict) -> dict[str, dict]:
    """On a rank: the curve of each run, what it holds and sends, and its checkpoint after two steps."""
    from unittest.mock import patch

    from mimo_train.debug.nan_findings import are_finite
    from mimo_train.models.transformers_lm import TransformersLanguageModel
    from tests.dist.steps import Steps

    done = {}
    for name, cfg in cfgs.items():
        sharded = cfg.modules["language"].layout.fsdp
        whole = patch.object(TransformersLanguageModel, "load_weights", side_effect=AssertionError("reads all"))
        with whole if sharded else patch.dict({}):
            run = Steps(cfg)
        (chunk,) = run.model
        held = sum(value.numel() for value in (chunk.shards.values() if sharded else chunk.parameters()))
        with patch("torch.distributed.reduce_scatter_tensor", wraps=torch.distributed.reduce_scatter_tensor) as sent:
            points = run.train(2)
        folder = str(run.save())
        done[name] = {
            "curve": points + run.train(STEPS - 2),
            "held": held,
            "sent": sent.call_count,
            "microbatches": len(run.session.data.current.microbatches),
            "groups": len(chunk._groups) if sharded else 0,
            "folder": folder,
        }
        if sharded and torch.distributed.get_rank() == 1:
            # Findings of this rank alone, which must not wait for the other.
            next(iter(chunk.shards.values())).data.fill_(torch.nan)
            done[name]["finite"] = are_finite(chunk.parameters())
    return done


def _resume(cfgs: dict) -> dict[str, list]:
    from tests.dist.steps import Steps

    return {name: Steps(cfg).train(STEPS - 2) for name, cfg in cfgs.items()}


def test_shards_train_and_resume_as_replicas(prose, tmp_path):
    run_ranks(_make, 1, tmp_path)
    cfgs = {}
    for name, (kind, own) in CASES.items():
        for layout in ("fsdp", "dp"):
            place = tmp_path / f"{name} {layout}"
            shard = (FSDP,) if layout == "fsdp" else ()
            cfgs[name, layout] = run_of("gpt_tiny", place, prose, tmp_path / kind, AS_IS, *TWO, *own, *shard)
    ranks = run_ranks(_train, 2, cfgs)
    trained, other = ranks
    bounds = {"experts": 2e-2}  # bf16
    for name in CASES:
        ours, theirs = trained[name, "fsdp"], trained[name, "dp"]
        for point, expected in zip(ours["curve"], theirs["curve"], strict=True):
            assert point == pytest.approx(expected, rel=bounds.get(name, BOUND)), name
        assert ours["held"] + other[name, "fsdp"]["held"] == theirs["held"] and ours["microbatches"] > 1
        first, *rest = other[name, "fsdp"]["finite"]
        assert not first and all(rest)
        # Adapters are reduced once a step, in each layer; others in every microbatch, each layer and the tables.
        assert ours["sent"] == 2 * (2 if name == "adapters" else ours["groups"] * ours["microbatches"]), name
    again = {}
    for name, layout, source in (
        ("whole", "fsdp", "fsdp"),
        ("whole", "fsdp", "dp"),
        ("adapters", "dp", "fsdp"),
        ("experts", "fsdp", "fsdp"),
    ):
        kind, own = CASES[name]
        shard = (FSDP,) if layout == "fsdp" else ()
        folder = f"checkpoint.resume={trained[name, source]['folder']}"
        place = tmp_path / f"{name} {source} as {layout}"
        cfg = run_of("gpt_tiny", place, prose, tmp_path / kind, AS_IS, *TWO, *own, *shard, folder)
        again[name, layout, source] = cfg
    resumed = run_ranks(_resume, 2, again)[0]
    for (name, layout, source), points in resumed.items():
        expected = trained[name, source]["curve"][2:]
        if layout == source:
            assert points == expected, name
        for point, wanted in zip(points, expected, strict=True):
            assert point == pytest.approx(wanted, rel=bounds.get(name, BOUND)), (name, layout, source)
