"""SmolLM2-135M-Instruct in, out, and with eyes.

    scripts/smollm2.sh models/smollm2
    python benchmarks/smollm2.py parity models/smollm2 runs/smollm2     # logits, greedy texts, out again bit for bit
    python benchmarks/smollm2.py digits models/smollm2 runs/smollm2     # shards, and a tower that has seen digits
    python benchmarks/smollm2.py train models/smollm2 runs/smollm2      # the tower and a projector on it, with LoRA

On one process; `train` goes on until it is told to stop (Ctrl-C or SIGTERM), or to the end.
"""

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

QUESTION = "Which digit is this?"
PLAIN = {
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What colour is the sky?": "The sky is blue.",
    "How many days has a week?": "A week has seven days.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is two plus two?": "Two plus two is four.",
}
"""One sample in ten is one of these, without an image, so that the model does not take every question for one about a
digit."""
PROMPTS = ["What is the capital of France?", "Name three colours.", "Write one sentence about the sea."]
SIDE = 16
"""Pixels of an image, which has one digit: four patches."""


def parity(source: Path, work: Path) -> None:
    """Our logits and texts against those of transformers, and an export against the directory."""
    import torch
    from safetensors.torch import load_file

    run, out = work / "parity", work / "parity-out"
    _train("gpt_tiny", f"modules.language.pretrained={source}", f"run.dir={run}", *_UNCHANGED, *_text(work))
    ours = _Ours(run)
    logits, texts = [ours.logits(prompt) for prompt in PROMPTS], [ours.text(prompt, 48) for prompt in PROMPTS]
    ours.close()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    print(f"weights in {next(model.parameters()).dtype}")
    for prompt, mine, text in zip(PROMPTS, logits, texts, strict=True):
        asked = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            theirs = model(**ids).logits[0]
            answer = model.generate(**ids, max_new_tokens=48, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert mine.shape[0] == theirs.shape[0], "the template gives other tokens"
        error = (mine[:, : theirs.shape[1]] - theirs).abs().max() / theirs.abs().max()
        same = tokenizer.decode(answer, skip_special_tokens=True) == text
        print(f"{prompt!r}: logits differ by {error:.1e} of their scale, greedy text equal: {same}: {text!r}")
    del model
    assert _command("export", str(run), "--to", str(out)) == 0
    read = {
        folder: {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in (source, out)
    }
    equal = [torch.equal(value, read[out][name]) for name, value in read[source].items()]
    print(f"{sum(equal)} of {len(equal)} tensors out bit for bit, {len(read[out].keys() - read[source].keys())} others")


def digits(source: Path, work: Path) -> None:
    """Shards of images with one digit, and a tower that a small language model has learned to read them with."""
    _write_shards(work)
    _command_of_a_child(_make_directories, work)
    run = work / "tower-run"
    _train(
        *("vlm_digits", "layout=one_process", f"run.dir={run}", *_shards(work), "data.tokenizer=bytes"),
        *(f"modules.images.pretrained={work}/random-tower", f"modules.language.pretrained={work}/random-llama"),
        *("data.sequence_length=72", "train.iters=1500", "train.global_batch_size=16", "train.micro_batch_size=16"),
        *("train.eval_interval=250", "optim.lr=2e-3", "checkpoint.save_interval=0"),
    )
    _command("export", str(run), "--to", str(work / "tower-out"))


def train(source: Path, work: Path) -> None:
    """The run of the record."""
    _train(
        *("vlm_digits", "layout=one_process", f"run.dir={work}/seeing", *_shards(work)),
        *(f"modules.images.pretrained={work}/tower-out/images", f"modules.language.pretrained={source}"),
        *("modules.language.lora.rank=8", "modules.language.optim.lr=5e-4", "modules.images.optim.projector_lr=2e-3"),
        *("data.sequence_length=56", "train.iters=240", "train.global_batch_size=8", "train.micro_batch_size=8"),
        *("train.eval_interval=60", "train.eval_samples=48", "train.report_samples=8", "optim.lr=3e-4"),
        *("optim.warmup_iters=10", "checkpoint.save_interval=60", "checkpoint.trained_only=true"),
    )
    ours = _Ours(work / "seeing")
    for prompt in PROMPTS:
        print(f"{prompt!r}: {ours.text(prompt, 48)!r}")


_UNCHANGED = (
    *("train.iters=1", "optim.lr=0", "optim.min_lr=0", "train.global_batch_size=1", "train.micro_batch_size=1"),
    *("train.eval_interval=0", "train.report_samples=0"),
)


def _text(work: Path) -> tuple[str, ...]:
    return (f"data.shards={work}/text/train", f"data.validation_shards={work}/text/held_out", "train.eval_samples=1")


def _shards(work: Path) -> tuple[str, ...]:
    return "data.demo=", f"data.shards={work}/digits/train.tar", f"data.validation_shards={work}/digits/held_out.tar"


def _train(config: str, *overrides: str) -> None:
    code = _command_of_a_child(_train_here, config, overrides)
    assert code == 0, code


def _train_here(config: str, overrides: tuple[str, ...]) -> int:
    from mimo_train.config.compose import load
    from mimo_train.training.pretrain import pretrain

    return pretrain(load(config, [*overrides, "log.tensorboard=false", "run.device=cpu"]))


def _command(*arguments: str) -> int:
    return _command_of_a_child(_command_here, list(arguments))


def _command_here(arguments: list[str]) -> int:
    from mimo_train.cli import main

    return main(arguments)


def _command_of_a_child(function, *arguments):  # type: ignore[no-untyped-def]
    """In a process of its own, where it has process groups of its own."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class _Ours:
    """The model of a run, as `mimo-train generate` has it."""

    def __init__(self, run: Path):
        from mimo_train.evaluation.generation.answers import Answers
        from mimo_train.evaluation.generation.decoder import Decoder
        from mimo_train.evaluation.generation.options import Sampling
        from mimo_train.evaluation.generation.prompts import Prompts
        from mimo_train.evaluation.open_model import open_model

        opened = open_model(run)
        self._parts = opened.parts
        self._decoder = Decoder(self._parts.pipeline)
        self._prompts = Prompts(opened.cfg, self._parts.tokenizer)
        self._answers = lambda most: Answers(
            opened.cfg, self._decoder, self._parts.tokenizer, Sampling(), max_new_tokens=most
        )

    def _prompt(self, text: str):  # type: ignore[no-untyped-def]
        from mimo_train.evaluation.generation.prompts import user_turn

        return self._prompts.of_conversation([user_turn(text, [])], [])

    def logits(self, text: str):  # type: ignore[no-untyped-def]
        """[S, V] of a question in the chat template."""
        import torch

        ids = torch.tensor([self._prompt(text).ids])
        with torch.no_grad():
            model = self._parts.pipeline.model[0]
            return model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], attention_mask=None)[0].float()

    def text(self, prompt: str, most: int) -> str:
        """Greedy."""
        return self._answers(most)(self._prompt(prompt)).text

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def _write_shards(work: Path) -> None:
    from data.demo.samples import load_scans

    (work / "digits").mkdir(parents=True, exist_ok=True)
    for part, number in (("train", 6000), ("held_out", 96)):
        held_out = part == "held_out"
        with tarfile.open(work / "digits" / f"{part}.tar", "w") as tar:
            for row, members in enumerate(_samples(load_scans(held_out), number, held_out)):
                for extension, raw in members:
                    info = tarfile.TarInfo(f"{row:06d}.{extension}")
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))


def _samples(scans, number: int, held_out: bool) -> Iterator[list[tuple[str, bytes]]]:  # type: ignore[no-untyped-def]
    from data.demo.samples import COLOURS, draw_digit, encode_image

    for row in range(number):
        rng = np.random.default_rng([int(held_out), row])
        if not held_out and row % 10 == 9:
            question, answer = list(PLAIN.items())[row // 10 % len(PLAIN)]
            yield [("json", _record(question, answer))]
            continue
        at = int(rng.integers(len(scans.labels)))
        image = draw_digit(scans.scans[at], int(rng.integers(len(COLOURS))), (SIDE, SIDE), rng)
        record = _record(f"<image>\n{QUESTION}", str(scans.labels[at]))
        yield [("png", encode_image(image, "png")), ("json", record)]


def _record(question: str, answer: str) -> bytes:
    return json.dumps(
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
    ).encode()


def _make_directories(work: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(1)
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 384, "num_hidden_layers": 3}
    tower = SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=SIDE, patch_size=8))
    _redraw(tower)
    tower.save_pretrained(work / "random-tower")
    processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=[0.05] * 3, image_std=[0.25] * 3)
    processor.save_pretrained(work / "random-tower")
    sizes |= {"num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 128, "tie_word_embeddings": True}
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    _redraw(llama)
    llama.save_pretrained(work / "random-llama")


def _redraw(model) -> None:  # type: ignore[no-untyped-def]
    """Narrow models want larger initial weights than the usual ones."""
    import torch

    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.07)


if __name__ == "__main__":
    step, source, work = sys.argv[1], *map(Path, sys.argv[2:4])
    {"parity": parity, "digits": digits, "train": train}[step](source, work)
