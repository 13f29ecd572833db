"""Time and memory of initial weights on one rank of a tensor-parallel model: 1.24 billion parameters on 8 ranks.

    python benchmarks/initial_weights.py [--llm llama_1b] [--tp 8] [--rank 3] [--precision bf16]

The rank is alone, on torch's fake process groups: nothing is sent while a model is built. Two processes build its
layers, without the buffers of gradients: one draws, one does not. Memory is the kernel's peak (VmHWM) of the one that
draws, above that of the other and the weights, which the other never touches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MIB = 2**20


def build(args: argparse.Namespace) -> dict[str, float]:
    """Build the layers of this rank; seconds, and bytes."""
    from mimo_train.preflight.dry_run.one_rank import import_program

    import_program()
    import torch

    from mimo_train.config.compose import load
    from mimo_train.layout.run import resolve
    from mimo_train.models import build as building
    from mimo_train.models.parameters import global_names
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups
    from mimo_train.preflight.dry_run import fake_world

    torch.set_num_threads(1)
    building._wrap = lambda module, *_: module
    with tempfile.TemporaryDirectory() as name:
        cfg = load(
            "gpt_tiny",
            [f"llm@modules.language.llm={args.llm}", f"modules.language.layout.tp={args.tp}", f"run.dir={name}/run",
             f"modules.language.llm.vocab_size={args.vocabulary}", "data.demo=", "data.shards=none",
             "data.validation_shards=", f"train.precision={args.precision}", "run.device=cpu"],
        )  # fmt: skip
        run = resolve(cfg)
    fake_world.join(args.rank, args.tp)
    device = devices.install("cpu")
    groups = build_groups(run.layout, 1)
    undrawn = frozenset() if args.draw else {("language", "llm")}
    wall, cpu = time.perf_counter(), time.process_time()
    chunks = building.build_model(
        cfg, run.layout, groups, vocab_size=args.vocabulary, special_token_ids={}, device=device, te=False,
        undrawn=undrawn,
    )  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    weights = [value for chunk in chunks for value in global_names(chunk).values()]
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "parameters": sum(value.numel() for value in weights),
        "seconds": wall,
        "CPU seconds": cpu,
        "held": sum(value.nbytes for value in weights) / MIB,
        "largest": max(value.nbytes for value in weights) / MIB,
        "peak": int(peak.split()[1]) * 1024 / MIB,
    }


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", default="llama_1b")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--draw", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw is not None:
        print(json.dumps(build(args)))
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = ([sys.executable, *sys.argv, f"--draw={draw}"] for draw in (0, 1))
    bare, drawn = (json.loads(subprocess.check_output(each, env=environment).splitlines()[-1]) for each in commands)
    print(f"{drawn['parameters']:,} parameters, {drawn['held']:.0f} MiB, the largest {drawn['largest']:.0f} MiB")
    print(f"{drawn['seconds'] - bare['seconds']:.2f} s, {drawn['CPU seconds'] - bare['CPU seconds']:.2f} s CPU")
    print(f"extra memory {drawn['peak'] - bare['peak'] - drawn['held']:.0f} MiB")


if __name__ == "__main__":
    main()
