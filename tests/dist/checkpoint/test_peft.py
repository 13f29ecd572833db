"""Adapters of our layers against PEFT's own: merged, the weights are the same, whoever made the adapter."""

import importlib.util
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config

ROUNDING = 2e-6
"""Largest difference of merged weights, over the largest weight."""
SIZES = (
    "layout=language_one",
    "modules.language.llm.num_query_groups=2",
    "modules.language.llm.tie_embeddings=true",
    "data.sequence_length=32",
)
KINDS = {
    "lora beside fused layers": ("modules.language.lora.rank=3",),
    "rslora of projections": (
        "modules.language.lora.rank=3",
        "modules.language.lora.rslora=true",
        "modules.language.lora.targets=[q_proj, v_proj, gate_proj, o_proj]",
    ),
    "dora of both": (
        "modules.language.lora.rank=3",
        "modules.language.lora.dora=true",
        "modules.language.lora.targets=[linear_qkv, up_proj, down_proj]",
    ),
}
PEFT_KINDS = {
    "rslora": {"use_rslora": True, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "dora": {"use_dora": True, "target_modules": "all-linear"},
}
PARTS = {"self_attention": "self_attn", "mlp": "mlp"}
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the library itself is the reference")


@pytest.fixture
def tiny(prose, tmp_path):
    def make(*overrides: str, name: str = "run"):
        return config("gpt_tiny", tmp_path / name, prose, "train.iters=4", *SIZES, *overrides)

    return make


def linears_and_places(cfg) -> tuple:
    """Our linear layers, and where a Llama of transformers has them."""
    from mimo_train.hf.peft import Place
    from mimo_train.layout.adapters import linears

    found, where = linears("language", cfg.language, cfg.llm.hidden_size), {}
    for linear in found:
        _, _, layer, part, _ = linear.name.split(".")
        where[linear.name] = {one: Place(f"model.layers.{layer}.{PARTS[part]}.{one}") for one, _ in linear.projections}
    return found, where


def _split_weights(cfg, chunk) -> dict:
    """The weights of our linear layers by transformers' names, as arrays, which go from one process to another."""
    from mimo_train.models.lora import FusedRows
    from mimo_train.models.parameters import global_names

    found, where = linears_and_places(cfg)
    weights, names = {}, global_names(chunk)
    for linear in found:
        pieces = FusedRows(linear).split(names[f"{linear.name}.weight"].detach().clone(), where[linear.name])
        weights |= {f"{where[linear.name][one].path}.weight": piece.numpy() for one, piece in pieces.items()}
    return weights


def _written(cfgs: list, folders: list[Path]) -> list[tuple[dict, dict]]:
    """Write random adapters of each config, and return the linear layers' weights before and after merging."""
    import torch

    from mimo_train.hf.peft import write_adapter
    from mimo_train.models.lora import merge_lora, whole_adapters

    results = []
    for (cfg, chunk), folder in zip(_models(cfgs), folders, strict=True):
        base = _split_weights(cfg, chunk)
        torch.manual_seed(3)
        adapters = whole_adapters(chunk)
        for name, value in adapters.items():
            value.mul_(1 + 0.3 * torch.rand(value.shape)) if "magnitude" in name else value.normal_(std=0.3)
        write_adapter(folder, adapters, cfg.language.lora, *linears_and_places(cfg))
        merge_lora([chunk])
        results.append((base, _split_weights(cfg, chunk)))
    return results


def _models(cfgs: list):
    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    runs = [resolve(cfg) for cfg in cfgs]
    place = start_processes(cfgs[0])
    for run in runs:
        yield run.cfg, build_parts(run, *place).pipeline.model[0]


def _merged(cfgs: list, folders: list[Path]) -> list[tuple[dict, dict]]:
    """Weights before and after merging the adapter of each folder."""
    from mimo_train.hf.peft import read_adapter
    from mimo_train.models.lora import load_adapters, merge_lora

    results, adapters = [], []
    for cfg, folder in zip(cfgs, folders, strict=True):
        cfg.language.lora, tensors = read_adapter(folder, *linears_and_places(cfg))
        adapters.append(tensors)
    for (cfg, chunk), tensors in zip(_models(cfgs), adapters, strict=True):
        base = _split_weights(cfg, chunk)
        load_adapters([chunk], tensors)
        merge_lora([chunk])
        results.append((base, _split_weights(cfg, chunk)))
    return results


def _llama(cfg, weights: dict):
    """A Llama of transformers with these weights in its linear layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    llm = cfg.llm
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=llm.hidden_size,
            intermediate_size=llm.ffn_hidden_size,
            num_hidden_layers=llm.num_layers,
            num_attention_heads=llm.num_attention_heads,
            num_key_value_heads=llm.num_query_groups,
            tie_word_embeddings=True,
        )
    )
    tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and not [name for name in missing if "_proj" in name]
    return model


def _arrays(model) -> dict:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def _largest_difference(ours: dict, theirs: dict) -> float:
    return max(float(abs(ours[name] - theirs[name]).max() / abs(theirs[name]).max()) for name in ours)


def test_an_adapter_that_is_written_and_read_merges_to_the_same_weights(tiny, tmp_path):
    folders = [tmp_path / name.replace(" ", "_") for name in KINDS]
    (written,) = run_ranks(_written, 1, [tiny(*overrides) for overrides in KINDS.values()], folders)
    (read,) = run_ranks(_merged, 1, [tiny() for _ in KINDS], folders)
    for (base, merged), (same_base, same) in zip(written, read, strict=True):
        assert not _largest_difference(base, same_base) and _largest_difference(merged, base) > 0.1
        assert _largest_difference(merged, same) < ROUNDING


@needs_peft
def test_peft_loads_our_adapters_and_merges_them_to_our_weights(tiny, tmp_path):
    from peft import PeftModel

    folders, cfgs = [tmp_path / name.replace(" ", "_") for name in KINDS], [tiny(*one) for one in KINDS.values()]
    (results,) = run_ranks(_written, 1, cfgs, folders)
    for cfg, folder, (base, merged) in zip(cfgs, folders, results, strict=True):
        theirs = PeftModel.from_pretrained(_llama(cfg, base), folder).merge_and_unload()
        theirs = _arrays(theirs)
        assert _largest_difference(merged, theirs) < ROUNDING
        assert _largest_difference(base, theirs) > 0.1


@needs_peft
def test_adapters_that_peft_made_merge_to_its_weights(tiny, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    cfgs, folders, expected = [tiny() for _ in PEFT_KINDS], [tmp_path / name for name in PEFT_KINDS], []
    ((base, _),) = run_ranks(_written, 1, [tiny("modules.language.lora.rank=1")], [tmp_path / "unused"])[0]
    for folder, options in zip(folders, PEFT_KINDS.values(), strict=True):
        torch.manual_seed(5)
        model = get_peft_model(_llama(cfgs[0], base), LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
            if "magnitude" in name:
                parameter.data *= 1 + 0.3 * torch.rand(parameter.shape)
        model.save_pretrained(folder)
        expected.append(_arrays(model.merge_and_unload()))
    (results,) = run_ranks(_merged, 1, cfgs, folders)
    for (same_base, merged), theirs in zip(results, expected, strict=True):
        assert not _largest_difference(base, same_base)
        assert _largest_difference(merged, theirs) < ROUNDING < 0.1 < _largest_difference(base, theirs)
