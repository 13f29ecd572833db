"""A directory of each family of language models in bf16, of several files, into a run and out again by the command;
transformers has our logits of it. Of models of several parts the language model alone, with the rest as it came."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mimo_train.config.pretrained.weight_files import BIN_INDEX, INDEX
from mimo_train.families.weights import HEAD, TABLE
from mimo_train.hf.tensors import TensorFolder
from mimo_train.layout.run import resolve
from tests.dist.commands import command
from tests.dist.hf.asking import logits_here
from tests.dist.hf.models import make_gemma3
from tests.dist.hf.one_step import BOUND, difference
from tests.dist.hf.test_pretrained import pretrained, tensors
from tests.dist.models.composites import hub_name
from tests.dist.models.composites import made as make_composite
from tests.dist.models.families import FAMILIES, made
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps

CASES = {
    "llama, tied, llama3": "fp32",
    "mistral, window, yarn": "bf16",
    "mixtral": "fp32",
    "qwen2, window in some layers": "bf16",
    "qwen3, biases, one key head": "fp32",
    "qwen3_moe, a dense layer": "bf16",
    "glm4_moe, biases, head norms": "bf16",
    "deepseek_v3, yarn, groups": "fp32",
    "qwen3_5": "bf16",
    "qwen3_next, a dense layer": "fp32",
    "phi3, half of a head": "bf16",
    "gpt_oss": "bf16",
    "gemma2": "fp32",
    "gemma3": "bf16",
    "gemma3 with images": "fp32",
    "qwen2_5_vl": "fp32",
    "llava_next": "fp32",
}
"""Precision of the run, by the names of the models."""
IN_MXFP4 = "gpt_oss"
"""Of these, the one that is read from blocks and scales of 4-bit numbers."""
AS_BIN = "llama, tied, llama3"
"""Of these, the one whose directory has `.bin` files."""
ROUTER_BIAS = "e_score_correction_bias"
FILE_BYTES = 40_000
IDS = np.random.default_rng(1).integers(0, 200, (2, 24)).tolist()


def _make(root: Path) -> None:
    for name in CASES:
        if name in FAMILIES:
            sizes = {"hidden_size": 64, "intermediate_size": 32} if name == IN_MXFP4 else {}
            model = made(name, vocab_size=300, **sizes)
        else:
            model = make_gemma3() if "gemma3" in name else make_composite(name)
        packed = _packed(model) if name == IN_MXFP4 else {}
        biases = {at: bias.clone() for at, bias in model.named_buffers() if at.endswith(ROUTER_BIAS)}
        model.to(torch.bfloat16)
        for at, bias in biases.items():  # transformers keeps them in fp32
            model.get_submodule(at.removesuffix(f".{ROUTER_BIAS}")).e_score_correction_bias = bias
        model.save_pretrained(root / name, max_shard_size=f"{FILE_BYTES // 1000}KB")
        if packed:
            _save_packed(root / name, root / f"{name} in MXFP4", packed)
    _save_as_bin(root / AS_BIN)


def _packed(model: Any) -> dict[str, torch.Tensor]:
    """Random blocks and scales of a model's experts, whose weights become these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, packed = torch.Generator().manual_seed(5), {}
    for name, stack in model.named_parameters():
        if stack.dim() == 3:
            shape = len(stack), stack.size(2), stack.size(1) // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
            stack.data = convert_moe_packed_tensors(blocks, scales)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert packed
    return packed


def _save_packed(folder: Path, to: Path, packed: dict[str, torch.Tensor]) -> None:
    """The directory with the experts as published ones have them."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    stacks = {name.removesuffix("_blocks") for name in packed}
    plain = {name: value for name, value in tensors(folder).items() if name not in stacks}
    save_file({**plain, **packed}, to / "model.safetensors")


def _save_as_bin(folder: Path) -> None:
    """Files as older versions of transformers wrote them, with the output layer of a tied model."""
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        values = load_file(file)
        if TABLE in values:
            values[HEAD] = values[TABLE]
        name = f"pytorch_{file.stem}.bin"
        torch.save(values, folder / name)
        places |= dict.fromkeys(values, name)
        file.unlink()
    (folder / INDEX).unlink()
    (folder / BIN_INDEX).write_text(json.dumps({"weight_map": places}))


def _read(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Logits, and weights that are missing or left over."""
    import transformers

    alone = folder.name in FAMILIES
    kind = transformers.AutoModelForCausalLM if alone else transformers.AutoModelForImageTextToText
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model, said = kind.from_pretrained(folder, output_loading_info=True, **options)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(IDS)).logits
    return logits.numpy(), [*said["missing_keys"], *said["unexpected_keys"]]


def _read_and_save(cfgs: dict) -> dict[str, str]:
    """On a rank: a checkpoint of each run before its first step."""
    return {name: str(Steps(cfg).save()) for name, cfg in cfgs.items()}


def _export(root: Path, checkpoints: dict[str, str]) -> dict[str, tuple]:
    """By the command, each into a folder of its name; what transformers reads from it, and our logits."""
    found = {}
    for name, checkpoint in checkpoints.items():
        options = ["--dtype", "bf16"] if CASES[name] == "fp32" else []
        options += ["--file-gigabytes", str(FILE_BYTES / 1e9)]
        code, said = command(["export", checkpoint, "--to", str(root / name), *options])
        assert code == 0, said
        own = logits_here(Path(checkpoint), IDS) if CASES[name] == "fp32" else None
        found[name] = *_read(root / name), own
    return found


def test_every_family_comes_in_and_goes_out_bit_for_bit(prose, tmp_path):
    run_ranks(_make, 1, tmp_path / "in")
    cfgs = {}
    for name, precision in CASES.items():
        layout = [f"modules.language.layout.{axis}=2" for axis in ("tp", "pp")]
        layout += ["modules.language.layout.sp=true"] if "num_experts_per_tok" in FAMILIES.get(name, ()) else []
        own = ("data.sequence_length=48", "data.tokenizer=bytes", f"train.precision={precision}", *layout)
        folder = tmp_path / "in" / (f"{name} in MXFP4" if name == IN_MXFP4 else name)
        cfgs[name] = pretrained("gpt_tiny", tmp_path / "runs" / name, prose, folder, *own)
    ranks = resolve(next(iter(cfgs.values()))).layout.processes[-1] + 1
    checkpoints = run_ranks(_read_and_save, ranks, cfgs)[0]
    (found,) = run_ranks(_export, 1, tmp_path / "out", checkpoints)
    for name in CASES:
        came, went = (
            {hub_name(tensor, name): value for tensor, value in tensors(tmp_path / where / name).items()}
            for where in ("in", "out")
        )
        if name == AS_BIN:
            folder = TensorFolder(tmp_path / "in" / name, "folder")
            came = {tensor: folder.whole(tensor) for tensor in folder.tensors if tensor != HEAD}
        assert came.keys() == went.keys(), (name, came.keys() ^ went.keys())
        for values in (came, went):
            kinds = {tensor: torch.float32 if tensor.endswith(ROUTER_BIAS) else torch.bfloat16 for tensor in values}
            assert {tensor: value.dtype for tensor, value in values.items()} == kinds, name
        assert all(torch.equal(value, went[tensor]) for tensor, value in came.items()), name
        for folder in (tmp_path / "in" / name, tmp_path / "out" / name)[name == AS_BIN :]:
            assert len(list(folder.glob("*.safetensors"))) > 3 and (folder / INDEX).is_file()
        logits, wrong, own = found[name]
        assert wrong == [], name
        if own is not None:
            assert difference(own, logits) < BOUND, name
