"""A rank of a CPU run imports what it uses."""

import os
import subprocess
import sys

from tests.hang import HANG_SECONDS

UNUSED = (
    "wandb",
    "torch.utils.tensorboard",
    "tensorboard",
    "networkx",
    "pandas",
    "scipy",
    "sklearn",
    "transformers",
    "torchvision",
    "torchaudio",
    "peft",
    "IPython",
    "torch._dynamo",
    "matplotlib",
)
ONE_STEP = f"""
import sys
from mimo_train.cli import main
code = main(["train", "vlm_digits", "layout=one_process", "run.device=cpu", "run.dir=run", "train.iters=1",
             "optim.warmup_iters=0", "train.eval_interval=0", "log.tensorboard=false", *sys.argv[1:]])
print("found", *(name for name in {UNUSED} if name in sys.modules))
import torch, wandb
from megatron.core import jit, timers
print("as released", torch.compile.__module__, wandb.__name__, timers.wandb, jit.jit_fuser(len) is len)
sys.exit(code)
"""


def test_a_step_of_the_demo_imports_nothing_that_it_does_not_use(tmp_path):
    from data.demo.make import make_demo

    make_demo(tmp_path / "digits", train_samples=32, held_out_samples=8, shards=1)
    shards = [
        f"data.shards={tmp_path}/digits/train",
        f"data.validation_shards={tmp_path}/digits/held_out",
        "data.demo=",
    ]
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, *shards],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "found" in lines, lines
    # What was kept away can be imported afterwards; Megatron-Core has done without it.
    assert lines[-1] == "as released torch wandb None True"


LATE = """
import os, sys
import torch
from mimo_train.parallel.device import light_imports
with light_imports("cpu"):
    import mimo_train.training.pretrain
from mimo_train.parallel import device
assert "torch._dynamo" not in sys.modules
device.install("cpu")
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph
compiled = torch.compile(lambda number: number + 1, backend=backend)
assert "torch._dynamo" in sys.modules
compiled(torch.ones(2))
print(len(calls))
with torch.compiler.set_stance("default"):
    compiled(torch.ones(2))
print(len(calls))
"""


def test_what_is_compiled_after_the_stand_ins_are_there_runs_eagerly():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]
