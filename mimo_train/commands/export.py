"""`mimo-train export`: a checkpoint of any layout as a directory that `transformers` reads."""

import argparse
from pathlib import Path
from typing import Any

from mimo_train.commands.arguments import about_files, above_zero, add_command, add_ema, add_trust

DTYPES = ("fp32", "bf16", "fp16")


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "export",
        about_files(_export),
        "write a checkpoint as a directory of transformers",
        "Writes a checkpoint as a directory that transformers reads, on one process, a few tensors at a time.\n\n"
        "examples:\n"
        "  mimo-train export runs/my_run --to exported\n"
        "  mimo-train export runs/my_run --to exported --push-to-hub my-org/my-model --private",
    )
    command.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder or URL of a run, or of one of its checkpoints"
    )
    command.add_argument("--to", required=True, type=Path, metavar="DIR", help="new folder to write")
    command.add_argument("--dtype", choices=DTYPES, help="of the weights (default: train.precision of the run)")
    command.add_argument(
        "--merge", action="store_true", help="put adapters into the weights (default: write them for peft)"
    )
    command.add_argument(
        "--base-model",
        default="",
        metavar="NAME",
        help="what adapters name as the model that they are for: a name of a hub, or a folder (default: the hub's name "
        "of a folder in its cache, else the folder itself)",
    )
    command.add_argument(
        "--push-to-hub", default="", metavar="ORG/NAME", help="upload it to a repository on the Hugging Face hub too"
    )
    command.add_argument("--private", action="store_true", help="make that repository private")
    command.set_defaults(usage_error=command.error)
    add_ema(command)
    add_trust(command)
    command.add_argument(
        "--file-gigabytes", type=above_zero, default=5, metavar="N", help="largest file, in 10^9 bytes (default: 5)"
    )


def _export(args: argparse.Namespace) -> int:
    if args.private and not args.push_to_hub:
        args.usage_error("--private requires --push-to-hub")
    from data.storage.url import place_of
    from mimo_train.checkpoint import folders
    from mimo_train.checkpoint.resume.same_run import recorded_config
    from mimo_train.evaluation.generation.source import require_average
    from mimo_train.hf.push import make_repository, push
    from mimo_train.logging.rank_log import adopt_torch, divert_command

    folder = folders.in_folder(place_of(args.checkpoint), "CHECKPOINT")
    cfg = recorded_config(folder, trust_code=args.trust_code, weights=True)
    if args.ema:
        require_average(cfg, folder)
    if args.push_to_hub:  # before the export, which takes its time
        make_repository(args.push_to_hub, private=args.private)
    run_dir = folders.run_of(folder)
    divert_command("export", run_dir if isinstance(run_dir, Path) else None)  # before imports that warn
    from mimo_train.hf.directory import new_directory

    with new_directory(args.to):
        import torch.distributed as dist

        adopt_torch()
        from mimo_train.evaluation.export import export

        written, _ = export(
            folder,
            cfg,
            args.to,
            dtype=args.dtype or "",
            largest_file=int(args.file_gigabytes * 10**9),
            merge=args.merge,
            base_model=args.base_model,
            ema=args.ema,
            announce=lambda form: print(form, flush=True),
        )
    for directory in written:
        print(f"{directory.what}: {directory.folder}")
        remedy = f"Edit them in {directory.folder}, or set it where you serve them"
        for change in directory.changes:
            print(f"warning: {change}, which transformers reads. {remedy}")
    if args.push_to_hub:
        print(f"uploaded: {push(args.to, args.push_to_hub)}")
    dist.destroy_process_group()
    return 0
