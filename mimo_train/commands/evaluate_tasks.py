"""`mimo-train evaluate --tasks`: benchmarks of lmms-eval."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_train.commands.arguments import given_sampling
from mimo_train.config.errors import UserError
from mimo_train.evaluation.benchmarks.requests import LOCAL

if TYPE_CHECKING:
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.evaluation.generation.source import Source
    from mimo_train.inputs.datasets import HeldOutSet

EXAMPLES = """tasks of lmms-eval, in an environment that has it (docs/evaluation.md):
  mimo-train evaluate runs/vlm_digits --tasks shards
  mimo-train evaluate runs/my --tasks mmmu_val,docvqa_val --limit 100 --processes 8
  mimo-train evaluate runs/my --tasks mmmu_val --backend vllm --vllm /opt/vllm/bin/python"""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `--tasks`."""
    option = command.add_argument_group("tasks of lmms-eval").add_argument
    option("--tasks", default="", metavar="A,B", help=f"its tasks, groups or tags; {LOCAL}: one of the samples")
    option("--include-path", "--include_path", default="", metavar="DIR", help="folder with further tasks")
    option("--output-path", "--output_path", default="", metavar="DIR", help="folder of lmms-eval's own files")
    option(
        "--backend",
        choices=("model", "vllm"),
        default="model",
        help="model (default): our model on this job's processes; vllm: a vLLM server of its export",
    )
    option("--vllm", default="", metavar="PYTHON", help="Python that has vLLM (default: the variable MIMO_VLLM)")
    option("--vllm-arguments", default="", metavar="TEXT", help="more of them: --vllm-arguments='--max-num-seqs 8'")


def task_names(args: argparse.Namespace) -> list[str]:
    """Return the names of `--tasks`. Raises UserError if lmms-eval is not installed, or an option would be
    ignored."""
    names = [name for name in args.tasks.split(",") if name]
    options = {"--include-path": args.include_path, "--output-path": args.output_path, "--vllm": args.vllm}
    options |= {"--backend": args.backend != "model", "--vllm-arguments": args.vllm_arguments}
    if not names and (unused := [name for name, value in options.items() if value]):
        raise UserError(f"{unused[0]}: requires --tasks")
    other = {"--metric": args.metric, "--references": args.references, "--predictions": args.predictions}
    other |= {"--batch": args.batch}
    if names and (unused := [*(name for name, value in other.items() if value), *given_sampling(args)]):
        raise UserError(f"{unused[0]}: is not supported with --tasks, which have metrics and sampling of their own")
    of_samples = {"--data": args.data, "--split": args.split}
    if names and LOCAL not in names and (unused := [name for name, value in of_samples.items() if value]):
        raise UserError(f"{unused[0]}: names the samples of the task {LOCAL}. Add it to --tasks, or remove the option")
    on_vllm = args.backend == "vllm"
    of_backend = ("--layout", "--processes") if on_vllm else ("--vllm", "--vllm-arguments")
    if names and (unused := [name for name in of_backend if getattr(args, name[2:].replace("-", "_"))]):
        raise UserError(f"{unused[0]}: is {'not supported with' if on_vllm else 'only for'} --backend vllm")
    if names and importlib.util.find_spec("lmms_eval") is None:
        raise UserError("--tasks: lmms-eval is not installed. docs/evaluation.md has the commands of its environment")
    return names


def evaluate_tasks(args: argparse.Namespace, source: Source, sets: list[HeldOutSet], output: Path) -> None:
    """Evaluate tasks, print their metrics and write tasks.json. Collective; raises UserError if one failed."""
    import torch.distributed as dist

    names = task_names(args)
    with ExitStack() as stack:
        backend: Any
        if args.backend == "vllm":
            from mimo_train.evaluation.benchmarks.on_vllm import served, vllm_python
            from mimo_train.inputs.datasets import tokenizer_of

            python, arguments = vllm_python(args.vllm), shlex.split(args.vllm_arguments)
            tokenizer = tokenizer_of(source.cfg)
            server = served(source.folder, python, trust_code=args.trust_code, arguments=arguments, ema=args.ema)
            backend = stack.enter_context(server)
        else:
            from mimo_train.evaluation.benchmarks.model import ModelAnswers
            from mimo_train.evaluation.open_model import build_model_of

            model = build_model_of(source)
            tokenizer = model.tokenizer
            if dist.get_world_size() > 1:
                from mimo_train.launch.rank_monitor import watched

                stack.enter_context(watched(model.run))
            backend = ModelAnswers(model.cfg, model.pipeline, tokenizer)
        from mimo_train.evaluation.benchmarks.lmms import run_tasks  # last: it changes the log's handlers

        values, failed = run_tasks(
            names,
            backend,
            local=_local(source.cfg, tokenizer, sets, stack) if LOCAL in names else None,
            include_path=args.include_path,
            limit=args.limit or None,
            output_path=args.output_path,
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        for name, metrics in values.items():
            for metric, value in metrics.items():
                print(f"{name + ' ' + metric:40} {value:.6g}")
        output.mkdir(parents=True, exist_ok=True)
        facts = {
            "checkpoint": str(source.folder),
            "ema": args.ema,
            "backend": args.backend,
            "limit": args.limit or None,
        }
        text = json.dumps({**facts, "tasks": values, "failed": failed}, indent=2)
        (output / "tasks.json").write_text(text + "\n")
        print(f"results: {output / 'tasks.json'}", flush=True)
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UserError(f"--tasks: {len(failed)} of {len(names)} failed: {reasons}")


def _local(cfg: ConfigContainer, tokenizer: Any, sets: list[HeldOutSet], stack: ExitStack) -> Any:
    from data.samples.shard_dataset import ShardDataset
    from mimo_train.evaluation.benchmarks.local_task import local_task
    from mimo_train.inputs.datasets import build_dataset

    if len(sets) != 1:
        raise UserError(f"--split: expected one set for the task {LOCAL}, got {len(sets)}. Choose one")
    dataset = build_dataset(cfg, tokenizer, held_out=sets[0])
    stack.callback(dataset.close)
    if not isinstance(dataset, ShardDataset):
        raise UserError(f"--tasks: {LOCAL} needs records, and {sets[0].source.shards} holds tokens")
    return local_task(dataset, min(sets[0].samples or len(dataset), len(dataset)))
