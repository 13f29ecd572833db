"""Host memory and time of reading a pretrained model, by rank, against the size of what a rank holds.

    python benchmarks/pretrained_memory.py [--layers 12] [--tp 2] [--fsdp]

A Llama of random weights is written as safetensors, and read by as many ranks as `--tp`, over gloo on the CPU. Peak
memory is the kernel's (VmHWM), reset before the weights are read, above what the process had then; with `--fsdp`, where
ranks share the class of transformers, reset before the model is built.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mimo_train.config.compose import load
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.estimate.parameters import padded_vocab_size
from mimo_train.families.config_json import language_keys
from mimo_train.families.weights import language_map
from mimo_train.hf.tensors import Planned, write_tensors
from tests.dist.ranks import run_ranks

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
MIB = 2**20


def write_model(folder: Path, layers: int) -> int:
    """Write the model; returns its bytes."""
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    spec = LlmSpec(**{key: value for key, value in language_keys(config).items() if key != "rope_scaling"})
    shapes = {}
    for rule in language_map(spec, padded_vocab_size(spec.vocab_size), "llama").rules:
        for rows in rule.rows:
            width = () if "norm" in rows.name else (4096,) if "down_proj" in rows.name else (1024,)
            if rows.name:
                shapes[rows.name] = (max(shapes.get(rows.name, (0,))[0], rows.first + rows.count), *width)
    planned = [Planned(name, shape, torch.float32) for name, shape in shapes.items()]
    write_tensors(folder, planned, (torch.randn(one.shape) for one in planned), 400 * MIB)
    return sum(one.size for one in planned)


def read_model(cfg) -> dict[str, float]:
    """What one rank holds, the largest tensor of the directory, and the peak of reading, in MiB; and seconds."""
    from mimo_train.config.pretrained.fill_in import parts_there
    from mimo_train.estimate.parameters import embedding_rows
    from mimo_train.hf.load import load_pretrained
    from mimo_train.layout.run import resolve
    from mimo_train.models.parameters import global_names
    from mimo_train.models.sharding import shard_of
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run, place = resolve(cfg), start_processes(cfg)
    before = _reset_peak()
    parts = build_parts(run, *place, undrawn=parts_there(cfg))
    pipeline = parts.pipeline
    held = sum(shard_of(value)[0].nbytes for chunk in pipeline.model for value in global_names(chunk).values())
    start = time.perf_counter()
    if not cfg.language.layout.fsdp:
        before = _reset_peak()
    load_pretrained(cfg, pipeline.model, pipeline.groups, embedding_rows(cfg.llm, parts.tokenizer.vocab_size))
    return {"held": held / MIB, "peak": (_peak() - before) / MIB, "seconds": time.perf_counter() - start}


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Peak resident memory of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Write, read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--fsdp", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_model(folder, args.layers)
        layout = [f"modules.language.layout.tp={args.tp}"]
        if args.fsdp:
            layout = [f"modules.language.layout.dp={args.tp}", "modules.language.layout.fsdp=true",
                      "modules.language.implementation=transformers", "train.micro_batch_size=1"]  # fmt: skip
        cfg = load(
            "gpt_tiny",
            [f"modules.language.pretrained={folder}", *layout, f"run.dir={folder}/run", "data.tokenizer=bytes",
             "data.demo=", "data.shards=none", "data.validation_shards=", "optim.distributed_optimizer=false"],
        )  # fmt: skip
        largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4 / MIB
        print(f"{size / MIB:.0f} MiB of weights, largest tensor {largest:.0f} MiB, {' '.join(layout)}")
        for rank, found in enumerate(run_ranks(read_model, args.tp, cfg)):
            bound = 1.1 * (found["held"] + largest)
            print(
                f"rank {rank}: holds {found['held']:.0f} MiB, peak {found['peak']:.0f} MiB above the start "
                f"(bound {bound:.0f}), {found['seconds']:.1f} s"
            )


if __name__ == "__main__":
    main()
