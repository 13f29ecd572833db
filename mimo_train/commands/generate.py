"""`mimo-train generate`: one process loads a model and answers a prompt, or holds a conversation."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimo_train.commands.arguments import (
    add_command,
    add_ema,
    add_model,
    add_sampling,
    add_trust,
    print_fault,
    sampling_of,
    users_faults,
)
from mimo_train.config.errors import UserError

if TYPE_CHECKING:
    from mimo_train.evaluation.generation.answers import Answer, Chat

KINDS = ("image", "video", "audio")
"""Kinds of media, which are options and commands of a conversation."""

CHAT_HELP = """/image FILE, /video FILE, /audio FILE
        attach an image, a video or a clip to the next message
/reset  begin again, without the turns so far
/help   these commands
/exit   end, as the end of the input does"""

DESCRIPTION = f"""Loads a model on one process and lets it answer.

examples:
  mimo-train generate runs/vlm_digits --image digit.png --prompt "Which digit is this?"
  mimo-train generate runs/vlm_digits --image a.png --image b.png --prompt "Is <image> larger than <image>?"
  mimo-train generate runs/gpt_tiny --prompt "It was" --temperature 0.8 --top-p 0.95 --seed 1
  mimo-train generate runs/vlm_digits --chat

A conversation (--chat) takes a message from each line of the input. Lines with a slash in front are commands:
{CHAT_HELP}"""


def add(commands: Any) -> None:
    """Add the command."""
    command = add_command(commands, "generate", _generate, "ask a checkpoint, or chat with it", DESCRIPTION)
    command.set_defaults(usage_error=command.error)
    option = command.add_argument
    add_model(command)
    option("--prompt", metavar="TEXT", help="what to ask; with --chat the first message")
    option("--chat", action="store_true", help="continue with messages from the input, line by line")
    option("--system", default="", metavar="TEXT", help="what stands before the conversation")
    option(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image; repeat it for several, in order: at the places that <image> marks in the prompt, or before it",
    )
    option(
        "--video",
        action="append",
        default=[],
        metavar="FILE",
        help="a video, at <video> or before the prompt, after the images; it is read as in training",
    )
    option(
        "--audio",
        action="append",
        default=[],
        metavar="FILE",
        help="a clip, at <audio> or before the prompt, after the images; repeat it for several",
    )
    option(
        "--prompt-format",
        choices=("auto", "chat", "text"),
        default="auto",
        help="chat: the prompt is the turn of a user, as in training on conversations; text: the model continues it; "
        "auto (default): text for a language model alone whose tokenizer has no chat template, without --chat and "
        "--system; else chat",
    )
    add_sampling(command)
    add_ema(command)
    add_trust(command)


def _generate(args: argparse.Namespace) -> int:
    """Print the answer to a prompt while it is decoded, then those to the messages of a chat."""
    if args.prompt is None and not args.chat:
        args.usage_error("one of --prompt TEXT and --chat is required")
    from data.storage.url import place_of
    from mimo_train.config.pretrained.hub import located
    from mimo_train.evaluation.generation.source import open_source
    from mimo_train.logging.rank_log import adopt_torch, divert_command

    prompt, chat, sampling = args.prompt, args.chat, sampling_of(args)
    media = [(kind, Path(file)) for kind in KINDS for file in getattr(args, kind)]
    for kind, file in media:
        if not file.is_file():  # before a model is loaded
            raise UserError(f"--{kind}: no file {file}")
    place = place_of(located(args.checkpoint, "CHECKPOINT"))
    source = open_source(place, trust_code=args.trust_code, seconds=_longest(media), ema=args.ema)
    options = {"--chat": chat, "--system": args.system, "media": media}
    asking = [name for name, is_given in options.items() if is_given]  # what only a conversation has
    if args.prompt_format == "text" and asking:
        raise UserError(f"--prompt-format: text continues a prompt without turns, leave out {' and '.join(asking)}")
    divert_command("generate", source.run_dir)
    import torch.distributed as dist

    adopt_torch()
    from mimo_train.evaluation.generation.answers import Answers, Chat
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.prompts import Prompts
    from mimo_train.evaluation.open_model import build_model_of

    parts = build_model_of(source).parts
    try:
        prompts = Prompts(source.cfg, parts.tokenizer)
        answers = Answers(source.cfg, Decoder(parts.pipeline), parts.tokenizer, sampling, args.max_new_tokens)
        has_template = not parts.tokenizer.template.is_own
        is_auto_chat = args.prompt_format == "auto" and bool(asking or source.cfg.encoders or has_template)
        if args.prompt_format != "chat" and not is_auto_chat:
            assert prompt is not None, "--chat asks for a conversation"
            _finish(answers(prompts.of_text(prompt), _write))
            return 0
        talk = Chat(prompts, answers, args.system)
        talk.attached = [prompts.medium(kind, file) for kind, file in media]
        if prompt is not None:
            _finish(talk.say(prompt, _write))
        if chat:
            _converse(talk, prompts.medium, _messages())
    finally:
        dist.destroy_process_group()
    return 0


def _longest(media: Iterable[tuple[str, Path]]) -> float:
    """Return the seconds of the longest audio."""
    from data.media.audio_files import parse_audio_header

    headers = (parse_audio_header(file.read_bytes()) for kind, file in media if kind == "audio")
    return max((header[0] / header[1] for header in headers if header), default=0.0)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _finish(answer: "Answer") -> None:
    print(flush=True)
    if answer.cut:
        print(f"notice: {answer.cut}", file=sys.stderr)


def _messages() -> Iterator[str]:
    """Lines of the input, with a prompt where a person types them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # lines can be edited, and called up again

    print("/help lists the commands", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _converse(talk: "Chat", read: Any, lines: Iterator[str]) -> None:
    """Answer the lines. An error of a line is printed, and the conversation continues.

    Args:
        read: (kind, file) -> the medium.
    """
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if not text:
            continue
        try:
            if text.startswith("/"):
                _obey(talk, read, text)
            else:
                _finish(talk.say(text, _write, keep_interrupted=True))
        except users_faults() as error:
            print_fault(error)
            if not text.startswith("/"):
                print("notice: the message and its media are not kept; /reset begins again", file=sys.stderr)


def _obey(talk: "Chat", read: Any, text: str) -> None:
    """Run a command of a conversation."""
    name, _, argument = text[1:].partition(" ")
    file = argument.strip().strip("\"'")
    if name in KINDS and file:
        talk.attached.append(read(name, Path(file).expanduser()))
    elif name == "reset":
        talk.reset()
    elif name == "help":
        print(CHAT_HELP, file=sys.stderr)
    else:
        raise UserError(f"{text}: no such command with such an argument, /help lists them")
