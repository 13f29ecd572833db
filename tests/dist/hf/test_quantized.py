"""Runs with a base in 4 bits against peft on a model that bitsandbytes has quantized."""

from pathlib import Path

import numpy as np
import pytest

from tests.dist.hf.models import make_llama
from tests.dist.hf.test_pretrained import pretrained
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps

pytest.importorskip("bitsandbytes")
STEPS, BOUND = 5, 2e-6
ADAM = ("optim.lr=0.01", "optim.min_lr=0.01", "optim.eps=1e-8", "optim.weight_decay=0", "optim.decay=constant")
ADAM += ("optim.warmup_iters=0", "optim.clip_grad=1", "optim.beta2=0.999", "train.iters=20")
NAMES = ("input_ids", "labels", "loss_mask")
LORA = "modules.language.lora."


def _theirs(root: Path):
    """A model with an adapter of peft next to weights that bitsandbytes has quantized; both are saved."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    make_llama(root / "llama", **sizes)
    model = AutoModelForCausalLM.from_pretrained(root / "llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.parameters():
                parameter *= 12 if parameter.dim() > 1 else 1  # so that rounding changes the loss
    model.save_pretrained(root / "llama")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantized = AutoModelForCausalLM.from_pretrained(root / "llama", quantization_config=nf4, dtype=torch.float32)
    quantized.save_pretrained(root / "nf4")
    for file in (root / "llama").glob("tokenizer*"):
        (root / "nf4" / file.name).write_bytes(file.read_bytes())
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(root / "llama", quantization_config=nf4, dtype=torch.float32)
    torch.manual_seed(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(root / "adapter")
    return model, quantized


def _losses(model, batches: list[list[dict]]) -> list[float]:
    """Loss of each step in transformers."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model.train()  # for inference bitsandbytes multiplies in bf16 on a CPU
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.01, eps=1e-8, betas=(0.9, 0.999), weight_decay=0), []
    for batch in batches:
        rows = [{name: part[name][row] for name in NAMES} for part in batch for row in range(len(part["input_ids"]))]
        ids, labels, mask = (pad_sequence([row[name] for row in rows], batch_first=True) for name in NAMES)
        logits = model(input_ids=ids).logits
        per_token = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        loss = (per_token * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(root: Path, prose: Path) -> dict:
    """Losses here and there, and first losses of runs from a directory that is quantized."""
    import torch

    from mimo_train.models.lora.quantized import dequantize

    model, nested = _theirs(root)
    lora = (f"{LORA}adapter={root / 'adapter'}", f"{LORA}quantization=nf4", *ADAM)
    run = Steps(pretrained("gpt_tiny", root / "run", prose, root / "llama", *lora))
    packed = run.parameters()["language.0.module.decoder.layers.0.mlp.linear_fc2.weight"]
    losses, batches = [], []
    for _ in range(STEPS):
        losses.append(run.train()[0][0])
        batches.append(run.session.data.current.microbatches)
    run.session.close()
    firsts = {}
    for name, quantization in (("nf4", "nf4"), ("nf4", ""), ("llama", "")):
        cfg = pretrained("gpt_tiny", root / f"{name}{quantization}", prose, root / name, lora[0], *ADAM)
        cfg.language.lora.quantization = quantization
        run = Steps(cfg)
        if quantization:
            weights = run.parameters()
            prefix = "language.0.module.decoder.layers.1.mlp.linear_fc2.weight"
            ours = dequantize(weights[prefix], weights[f"{prefix}_scales"], torch.float32)
            import bitsandbytes.functional as functional

            stored = nested.model.layers[1].mlp.down_proj.weight
            firsts["bytes"] = torch.equal(ours, functional.dequantize_4bit(stored.data, stored.quant_state))
        firsts[name, quantization] = run.train()[0][0]
        run.session.close()
    return {"ours": losses, "theirs": _losses(model, batches), "firsts": firsts, "dtype": str(packed.dtype)}


def test_five_steps_are_those_of_peft_with_bitsandbytes(prose, tmp_path):
    (found,) = run_ranks(compared, 1, tmp_path, prose)
    assert found["dtype"] == "torch.uint8"
    np.testing.assert_allclose(found["ours"], found["theirs"], rtol=BOUND)
    firsts = found["firsts"]
    assert firsts["bytes"], "a directory that is quantized keeps its numbers"
    assert firsts["nf4", "nf4"] == pytest.approx(firsts["nf4", ""], rel=BOUND)
    assert abs(firsts["llama", ""] - found["ours"][0]) > 10 * BOUND * abs(found["ours"][0]), "rounding changes the loss"
