"""`mimo-train evaluate`: score a trained model on held-out samples, or answer the prompts of a file."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_train.commands import evaluate_tasks
from mimo_train.commands.arguments import (
    add_command,
    add_ema,
    add_layout,
    add_model,
    add_sampling,
    add_trust,
    given_sampling,
    sampling_of,
    whole,
)
from mimo_train.config.errors import UserError
from mimo_train.evaluation.metrics import METRICS, require_metrics

if TYPE_CHECKING:
    from mimo_train.evaluation.generation.source import Source
    from mimo_train.evaluation.open_model import Model
    from mimo_train.inputs.datasets import HeldOutSet
    from mimo_train.training.reference import References

DESCRIPTION = f"""Measures loss and exact match of a model on held-out samples, as training does. Metrics of texts
compare generated answers with references. Writes results.json, predictions.jsonl and report.html.

examples:
  mimo-train evaluate runs/vlm_digits
  mimo-train evaluate runs/vlm_digits --metric anls,f1 --processes 2
  mimo-train evaluate runs/my/checkpoints/step_00001000 --data shards/docvqa --metric anls --layout tp=2
  mimo-train evaluate Qwen/Qwen2.5-VL-3B-Instruct --data my.yaml --split test --limit 500
  mimo-train evaluate runs/vlm_digits --prompts questions.jsonl --predictions answers.jsonl

{evaluate_tasks.EXAMPLES}

metrics:
  {"\n  ".join(f"{name:11}{metric.summary}" for name, metric in METRICS.items())}
  module:function  yours: (predictions, references) -> a number, one for each, or a dict of these"""


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(commands, "evaluate", _evaluate, "score a model on held-out samples", DESCRIPTION)
    option = command.add_argument
    add_model(command)
    option(
        "--data",
        default="",
        metavar="SHARDS|CONFIG",
        help="shards, or the config with the held-out sets; default: those of the run",
    )
    option("--split", default="", metavar="NAME", help="one set: validation, validation/NAME, test or test/NAME")
    option("--limit", type=whole, metavar="N", help="samples of each set; 0: all (default: as in training)")
    option("--metric", action="append", default=[], metavar="NAME,...", help="metrics of generated answers, see above")
    option(
        "--references",
        default="",
        metavar="FIELD",
        help="field of the records with the references of an answer (default: references or answers if there is one, "
        "else the answer itself)",
    )
    add_layout(command)
    option("--batch", type=whole, default=0, metavar="N", help="samples of a microbatch; 0: as in training (default)")
    option(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="answer the prompts of a JSONL file instead: lines with prompt or messages, and paths of image, video and "
        "audio; the same command continues after an interruption",
    )
    option("--output", metavar="DIR", help="folder of the files (default: a new one in RUN/evaluations)")
    option("--predictions", type=Path, metavar="FILE", help="file of the predictions (default: predictions.jsonl)")
    add_sampling(command)
    add_ema(command)
    add_trust(command)
    evaluate_tasks.add_options(command)


def _evaluate(args: argparse.Namespace) -> int:
    """Start ranks if the layout needs several, or evaluate as one."""
    from data.storage.url import place_of
    from mimo_train.config.pretrained.hub import located
    from mimo_train.evaluation.data_choice import chosen_sets, output_folder, with_data
    from mimo_train.evaluation.generation.source import open_source
    from mimo_train.launch.nodes import nodes_of
    from mimo_train.launch.start import launch_command
    from mimo_train.layout.run import resolve

    args.metric = [name for text in args.metric for name in text.split(",") if name]
    require_metrics(args.metric)
    tasks = evaluate_tasks.task_names(args)
    if args.prompts:
        options = ("data", "split", "limit", "metric", "references", "batch", "tasks")
        if given := [f"--{name}" for name in options if getattr(args, name)]:
            raise UserError(f"--prompts: answers prompts and measures no samples. Leave out {', '.join(given)}")
    elif not args.metric and not tasks:
        if unused := [*(["--references"] if args.references else []), *given_sampling(args)]:
            raise UserError(f"{unused[0]}: requires --metric, for which answers are generated")
    if args.layout and args.processes:
        raise UserError("--processes: the layout decides the number of processes. Remove one of them")
    started = int(os.environ.get("WORLD_SIZE") or 1)
    source = open_source(
        place_of(located(args.checkpoint, "CHECKPOINT")),
        trust_code=args.trust_code,
        layout=args.layout,
        processes=args.processes or started,
        micro_batch_size=args.batch,
        merge=False,
        ema=args.ema,
    )
    cfg, sets = source.cfg, []
    if cfg.traits.value_head and (args.prompts or tasks):
        raise UserError(f"CHECKPOINT: {source.folder} is a model with a value head, which writes no text")
    if not args.prompts and (not tasks or evaluate_tasks.LOCAL in tasks):
        if source.is_directory and not args.data:
            raise UserError(f"--data: {source.folder} is a model without data. Give shards, or a config with such sets")
        if tasks and not args.data and cfg.traits.form != "turns":
            raise UserError(f"--data: the samples of train.task={cfg.train.task} are preferences. Give answers")
        cfg = with_data(cfg, args.data)
        sets = chosen_sets(cfg, args.split, args.limit)
    output = Path(args.output) if args.output else output_folder(source.run_dir, source.folder.name)
    cfg = replace(cfg, run=replace(cfg.run, dir=str(output)))
    is_rank = started > 1 or nodes_of(os.environ).ranks is not None
    if not is_rank:
        if sets:
            _make_demo(cfg.data)
        if resolve(cfg).layout.world_size > 1:
            return launch_command([*args.argv, "--output", str(output)], cfg, output)
    return _rank(args, replace(source, cfg=cfg), sets)


def _make_demo(data: Any) -> None:
    if data.demo:
        from data.demo.make import make_demo

        make_demo(Path(data.shards).parent, data.demo)


def _rank(args: argparse.Namespace, source: "Source", sets: "list[HeldOutSet]") -> int:
    from mimo_train.logging.rank_log import adopt_torch, divert, log_of

    rank, several = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1) > 1
    output = Path(source.cfg.run.dir)
    log = divert(log_of(output, rank))
    if several:
        log.copy_console()
    import torch.distributed as dist

    adopt_torch()
    try:
        if args.prompts:
            _answer(args, source, output)
        elif args.tasks:
            evaluate_tasks.evaluate_tasks(args, source, sets, output)
        else:
            _measure(args, source, sets, output)
    except BaseException as error:
        if not several or not dist.is_initialized():
            raise
        from mimo_train.commands.rank_failure import end_rank

        end_rank(error, rank)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


@contextmanager
def _opened(source: "Source") -> "Iterator[Model]":
    """The model on this rank, which is watched if there are several. All ranks end together."""
    import torch.distributed as dist

    from mimo_train.evaluation.open_model import build_model_of
    from mimo_train.launch.rank_monitor import watched

    model = build_model_of(source)
    with watched(model.run) if dist.get_world_size() > 1 else nullcontext():
        yield model
        dist.barrier()


def _answer(args: argparse.Namespace, source: "Source", output: Path) -> None:
    import torch.distributed as dist

    from mimo_train.evaluation.answerer import Answerer, answer_prompts
    from mimo_train.evaluation.prompt_file import PromptFile
    from mimo_train.logging.console import progress_bar

    file, out = PromptFile(args.prompts), args.predictions or output / "predictions.jsonl"
    sampling = sampling_of(args)
    facts = {"checkpoint": str(source.folder), "ema": args.ema, "max_new_tokens": args.max_new_tokens}
    facts |= asdict(sampling)
    with _opened(source) as model:
        answerer = Answerer(model.cfg, model.pipeline, model.tokenizer, sampling, args.max_new_tokens)
        continues = not source.cfg.encoders and model.tokenizer.template.is_own
        first = dist.get_rank() == 0
        with closing(progress_bar("answers", len(file.records), "prompts", first)) as bar:
            answer_prompts(file, answerer, out, facts, continues=continues, progress=bar.add)
        if first:
            print(f"answers: {out}", flush=True)


def _references(source: "Source", model: "Model") -> "References":
    """Return what gives held-out sets the log-probabilities that the training of the model has stored."""
    from mimo_train.checkpoint.folders import read_record
    from mimo_train.evaluation.held_out import Ending
    from mimo_train.training.reference import References
    from mimo_train.training.step.state import TrainState

    progress = TrainState()
    if model.cfg.traits.needs_reference:
        progress.load_state_dict(read_record(source.folder, "train_state")["train_state"])
    return References(model.run, model.pipeline, progress, Ending(), source.trained)


def _measure(args: argparse.Namespace, source: "Source", sets: "list[HeldOutSet]", output: Path) -> None:
    import torch.distributed as dist

    from mimo_train.evaluation.data_choice import fitting_length
    from mimo_train.evaluation.evaluate import Settings, evaluate
    from mimo_train.evaluation.results import Results

    start, cfg = time.monotonic(), source.cfg
    if source.is_directory:
        length = fitting_length(cfg, sets, args.max_new_tokens if args.metric else 0)
        source = replace(source, cfg=replace(cfg, data=replace(cfg.data, sequence_length=length)))
    sampling = sampling_of(args)
    settings = Settings(args.metric, args.references, sampling, args.max_new_tokens)
    with _opened(source) as model:
        references = _references(source, model)
        facts = {
            "checkpoint": str(source.folder),
            "settings": {
                "task": cfg.train.task,
                "metrics": args.metric,
                "ema": args.ema,
                "layout": args.layout or f"processes={dist.get_world_size()}",
                "limit": args.limit,
                "micro_batch_size": cfg.train.micro_batch_size,
                "sequence_length": source.cfg.data.sequence_length,
                "precision": cfg.train.precision,
                **({"max_new_tokens": args.max_new_tokens, **asdict(sampling)} if args.metric else {}),
            },
        }
        results = Results(facts, cfg.train.report_samples)
        for of, evaluated in evaluate(model, sets, settings, serve=references.serve_held_out):
            results.add(of.label, evaluated)
        if dist.get_rank() == model.run.layout.logging_rank:
            results.write(output, args.predictions, time.monotonic() - start)
            trained, measured = source.trained or cfg, cfg.train.task
            if trained.train.task != measured:
                alone = "the student alone, " if trained.traits.has_teacher else ""
                print(f"train.task={trained.train.task}: measured is {alone}as train.task={measured}", flush=True)
            print(results, f"results: {output}", sep="\n", flush=True)
