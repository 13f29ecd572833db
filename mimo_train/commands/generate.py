"""`mimo-train generate`: one process loads a checkpoint of any layout and answers by greedy decoding."""

import argparse
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import add_command, positive
from mimo_train.config.fault import UserError


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "generate",
        _generate,
        "try a checkpoint",
        "Loads a checkpoint on one process and lets it answer.\n\nexample:\n"
        '  mimo-train generate runs/vlm_digits --image digit.png --prompt "Which digit is this?"',
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a run, or of one of its checkpoints")
    command.add_argument("--prompt", required=True, metavar="TEXT", help="what to ask")
    command.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture; repeat it for several, in order"
    )
    command.add_argument(
        "--audio", action="append", default=[], metavar="FILE", help="a clip, after the pictures; repeat it for several"
    )
    command.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="longest answer in tokens (default: 64)"
    )


def _generate(args: argparse.Namespace) -> int:
    media = {"image": args.image, "audio": args.audio}
    return main(args.checkpoint, prompt=args.prompt, media=media, max_new_tokens=args.max_new_tokens)


def main(checkpoint: str, *, prompt: str, media: dict[str, list[str]], max_new_tokens: int) -> int:
    """Print the answer to `prompt` about `media`: kind (image, audio) -> files. Returns the exit code.

    Raises:
        UserError: no complete checkpoint or a damaged one, a picture or clip that cannot be read or that no module
            takes, or a prompt that does not fit into `data.sequence_length`.
    """
    from mimo_train.checkpoint import folders
    from mimo_train.config.compose import from_dict

    files = {kind: _read(kind, paths) for kind, paths in media.items() if paths}
    folder = folders.in_folder(Path(checkpoint), "CHECKPOINT")
    cfg = from_dict(folders.read_record(folder, "config")["config"])

    from mimo_train.launch.library_log import adopt_torch, divert

    run_dir = folders.run_of(folder)
    if run_dir is not None:
        divert(run_dir / "logs" / "generate.log")
    import torch.distributed as dist

    adopt_torch()
    from mimo_train.checkpoint.store import load_weights
    from mimo_train.evaluation.answer import answer, on_one_process
    from mimo_train.model.lora import merge_lora
    from mimo_train.plan.run import resolve
    from mimo_train.training.setup import build_parts, start_processes

    run = resolve(on_one_process(cfg))
    parts = build_parts(run, *start_processes(run.cfg))
    model = parts.pipeline.model
    load_weights(folder, run.layout, model)
    merge_lora(model)
    model[0].eval()
    print(answer(run.cfg, parts.pipeline, parts.tokenizer, prompt, files, max_new_tokens))
    dist.destroy_process_group()
    return 0


def _read(kind: str, paths: list[str]) -> list[bytes]:
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"--{kind}: no file {path}")
    return [Path(path).read_bytes() for path in paths]
