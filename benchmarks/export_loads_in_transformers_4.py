"""Directories that `mimo-train export` writes, read by transformers 4 and 5: the logits of our own model, and no weight
missing.

    python benchmarks/export_loads_in_transformers_4.py [--environment FOLDER] [--keep FOLDER]

Tiny models of random weights are trained for a step and exported. Version 4 is installed into a folder of its own that
is put in front of this environment's packages, so that torch is not installed again; --environment keeps it for later.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VERSION_4 = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.0", "requests", "urllib3", "idna")
VERSION_4 += ("certifi", "charset-normalizer")
SIZES = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "intermediate_size": 100, "num_hidden_layers": 3, "max_position_embeddings": 512,
}  # fmt: skip
LANGUAGE = {
    "Llama 3.1": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "Qwen2.5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": None}),
    "Qwen3-MoE": ("Qwen3Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "Gemma 3": ("Gemma3", {"sliding_window": 8, "query_pre_attn_scalar": 20}),
}  # fmt: skip
"""Class of a family in transformers, and what it has besides the sizes."""
COMPOSITES = {
    "LLaVA-NeXT": "llava_next", "LLaVA-OneVision": "llava_onevision",
    "Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl",
}  # fmt: skip
"""As the tests make them."""


def make(family: str, folder: Path) -> None:
    """A language model of transformers 5 with random weights."""
    import torch
    import transformers

    name, own = LANGUAGE[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**{key: value for key, value in (SIZES | own).items() if value is not None})
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        # Gemma's norms multiply by 1 + weight.
        is_norm = parameter.ndim == 1 and not key.endswith("bias") and name != "Gemma3"
        torch.nn.init.normal_(parameter, float(is_norm), std=0.3 if parameter.ndim == 1 else 0.15)
    model.save_pretrained(folder)


def train(config: str, overrides: list[str]) -> None:
    """A short run."""
    from mimo_train.config.compose import load
    from mimo_train.training.pretrain import pretrain

    pretrain(load(config, [*overrides, "checkpoint.save_interval=0", "train.eval_interval=0", "data.workers=0"]))


def export(run: Path, to: Path) -> None:
    """As the command does."""
    from mimo_train.cli import main

    assert main(["export", str(run), "--to", str(to)]) == 0


def image() -> Any:
    """The one that every model sees."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(1).integers(0, 256, (60, 90, 3), dtype=numpy.uint8))


def read(folder: Path) -> dict:
    """What this version of transformers makes of a directory: logits, and what is wrong with it."""
    import torch
    import transformers

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    transformers.utils.logging.get_logger("transformers").addHandler(handler)
    is_composite = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if is_composite else transformers.AutoModelForCausalLM
    model, found = kind.from_pretrained(folder, output_loading_info=True)
    if is_composite:
        processor = transformers.AutoProcessor.from_pretrained(folder)
        if processor.chat_template is None:
            inputs = processor(text="<image>\nWhich digit?", images=image(), return_tensors="pt")
        else:
            content = [{"type": "image", "image": image()}, {"type": "text", "text": "\nWhich digit?"}]
            inputs = processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            )  # fmt: skip
    else:
        inputs = {"input_ids": torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(1))}
    with torch.no_grad():
        logits = model(**inputs).logits
    wrong = {name: sorted(map(str, keys)) for name, keys in found.items() if keys and name != "error_msgs"}
    wrong |= {"said": [text for text in said if "initialized" in text or "weights" in text]} if said else {}
    return {
        "version": transformers.__version__,
        "logits": logits.double().flatten().tolist(),
        "ids": inputs["input_ids"].tolist(),
        "pixels": inputs["pixel_values"].flatten().tolist() if is_composite else [],
        "wrong": {name: value for name, value in wrong.items() if value},
    }


def read_by(environment: Path | None, folder: Path) -> dict:
    """`read` in a process with the packages of a folder in front."""
    path = os.pathsep.join([str(environment)] if environment else [])
    options = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--read", str(folder)],
        env=options, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, run: Path, folder: Path, environment: Path) -> str:
    """A row of the table."""
    from tests.dist.hf.asking import logits_here
    from tests.dist.ranks import run_ranks

    new, old = (read_by(place, folder) for place in (None, environment))
    assert new["version"].startswith("5.") and old["version"] == "4.57.6", (new["version"], old["version"])
    file = run / "image.png" if new["pixels"] else None
    if file is not None:
        image().save(file)
    (found,) = run_ranks(logits_here, 1, run, new["ids"], file)
    own = found.flatten().tolist()
    errors = [
        max(abs(a - b) for a, b in zip(one["logits"], own, strict=True)) / max(map(abs, own)) for one in (old, new)
    ]
    inputs = "equal" if new["ids"] == old["ids"] and new["pixels"] == old["pixels"] else "DIFFERENT"
    wrong = json.dumps({"5": new["wrong"], "4": old["wrong"]}) if new["wrong"] or old["wrong"] else "none"
    return f"| {name} | {len(own)} | {errors[0]:.1e} | {errors[1]:.1e} | {inputs} | {wrong} |"


def make_all(work: Path) -> dict[str, tuple[Path, Path]]:
    """Every run and the directory that it was exported to, by what it is."""
    from data.demo.make import make_demo
    from tests.dist.hf.models import make_llava
    from tests.dist.models.composites import SAMPLES
    from tests.dist.models.composites import make as make_composite
    from tests.dist.ranks import run_ranks

    prose, digits = (
        make_demo(work / "prose", "text"),
        make_demo(work / "digits", train_samples=96, held_out_samples=16, shards=1),
    )
    found = {}
    step = [
        "train.iters=1",
        "train.global_batch_size=8",
        "data.validation_shards=",
        "data.demo=",
        "optim.warmup_iters=0",
    ]
    runs = {}
    for family in LANGUAGE:
        source = work / f"from {family}"
        run_ranks(make, 1, family, source)
        own = [f"modules.language.pretrained={source}", "data.tokenizer=bytes", f"data.shards={prose}/train"]
        runs[family] = ("gpt_tiny", own)
    drawn_images = [f"data.shards={digits}/train", "layout=one_process"]
    runs["LLaVA, made here"] = ("vlm_digits", drawn_images)
    runs["LLaVA, of a Qwen2.5 directory"] = (
        "vlm_digits",
        [*drawn_images, f"modules.language.pretrained={work / 'from Qwen2.5'}", "data.tokenizer=bytes"],
    )
    run_ranks(make_llava, 1, work / "from LLaVA-1.5")
    runs["LLaVA-1.5"] = (
        "vlm_digits",
        [*drawn_images, f"pretrained={work / 'from LLaVA-1.5'}", "data.sequence_length=160"],
    )
    for name, kind in COMPOSITES.items():
        source = work / f"from {name}"
        source.mkdir()
        run_ranks(make_composite, 1, source, kind)
        own = [f"pretrained={source / 'model'}", f"data.shards={source / 'samples.tar'}", "layout=one_process"]
        own += ["data.sequence_length=240", f"train.global_batch_size={len(SAMPLES)}", "train.micro_batch_size=1"]
        runs[name] = ("vlm_digits", own)
    for name, (config, own) in runs.items():
        run_ranks(train, 1, config, [*step, *own, f"run.dir={work / f'run {name}'}"])
        found[name] = work / f"run {name}", work / f"out {name}"
        run_ranks(export, 1, *found[name])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="folder of version 4 (default: made anew)")
    parser.add_argument("--keep", type=Path, help="folder of the models (default: removed at the end)")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        environment = arguments.environment or Path(temporary, "version_4")
        if not (environment / "transformers").is_dir():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(environment)]
            subprocess.run([*pip, *VERSION_4], check=True)
        work = arguments.keep or Path(temporary, "models")
        work.mkdir(parents=True, exist_ok=True)
        directories = make_all(work)
        print("Largest difference to our logits, of the largest of these:\n")
        print("| model | logits | 4.57.6 | 5 | ids and pixels of both | missing or unexpected weights |")
        print("|---|---|---|---|---|---|")
        for name, places in directories.items():
            print(compare(name, *places, environment), flush=True)


if __name__ == "__main__":
    main()
