"""Host memory and time of `mimo-train export`, against the size of what is written.

    python benchmarks/export_memory.py [--layers 12] [--dtype bf16]

A Llama of random weights with adapters becomes a checkpoint of a run on two ranks, tp 2, over gloo on the CPU, and one
process exports it with merged adapters. Peak memory is the kernel's (VmHWM), reset before the command, above what the
process had then.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pretrained_memory import CONFIG, MIB, _peak, write_model
from mimo_train.config.compose import load
from tests.dist.ranks import run_ranks
from tests.tars import write_tar


def write_checkpoint(cfg) -> str:
    """Start the run, and save what it starts with."""
    from tests.dist.steps import Steps

    return str(Steps(cfg).save())


def export(checkpoint: str, to: Path, options: list[str]) -> tuple[float, float]:
    """(peak in MiB, seconds) of the command."""
    import mimo_train.evaluation.export  # noqa: F401  what the command imports is no memory of the weights
    from mimo_train.cli import main

    Path("/proc/self/clear_refs").write_text("5")
    before, start = _peak(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = main(["export", checkpoint, "--to", str(to), *options])
    assert code == 0, said.getvalue()
    return (_peak() - before) / MIB, time.perf_counter() - start


def main() -> None:
    """Write, export and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        size = write_model(folder / "model", args.layers)
        write_tar(folder / "train" / "0.tar", [(f"{number}.txt", b"a text") for number in range(64)])
        cfg = load(
            "gpt_tiny",
            [f"modules.language.pretrained={folder}/model", "modules.language.layout.tp=2", f"run.dir={folder}/run",
             "data.demo=", f"data.shards={folder}/train", "data.validation_shards=", "data.tokenizer=bytes",
             "data.sequence_length=64", "modules.language.lora.rank=8", "data.workers=0"],
        )  # fmt: skip
        checkpoint = run_ranks(write_checkpoint, 2, cfg)[0]
        options = ["--merge", *(["--dtype", args.dtype] if args.dtype else [])]
        ((peak, seconds),) = run_ranks(export, 1, checkpoint, folder / "out", options)
        largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4 / MIB
        print(f"{size / MIB:.0f} MiB of weights, largest tensor {largest:.0f} MiB")
        print(f"peak {peak:.0f} MiB above the start, {seconds:.1f} s")


if __name__ == "__main__":
    main()
