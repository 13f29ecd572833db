"""Processor time of a training step, and memory: this program against `transformers` with the same sizes and batches.

    OMP_NUM_THREADS=1 python benchmarks/against_transformers.py demo            # or others of CASES, or all
    ... benchmarks/against_transformers.py all --kernels-off                    # ours without run.cpu_kernels, too
    ... benchmarks/against_transformers.py gpt_dp2 --blocks 30 --steps 4        # two processes, against torch's DDP
    ... benchmarks/against_transformers.py demo --reads                         # the reference reads samples too

The reference is what a user would write with `transformers`: LLaVA (a SigLIP tower, which has no class token, and a
Llama) or a plain Llama with scaled_dot_product_attention, `AdamW(fused=True)`, `clip_grad_norm_`, losses divided by
all tokens of the step, `no_sync` for all but the last microbatch. It takes the microbatches that our loader made, from
memory; ours reads, decodes and logs as it does by default. With `--reads` the reference does that work, too, as such a
user would (plain_reading.py): it reads as many samples a step and then trains on the same microbatches as without.

The sides make blocks of steps in turns (turns.py). Two clocks: the processor time of the whole process, with its
threads, and of the main thread. For each: the median of a step, and the median over rounds of the ratio to the
reference with the interval that holds 95 % of 2,000 redraws of the rounds. Memory is what a process holds at its peak
beyond what it was forked with.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.plain_reading import read_steps
from benchmarks.turns import Side, Turns, summary, take_turns
from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer

FIRST_STEPS = 2
"""Of a side, before anything is counted: buffers are made, threads are started."""


@dataclass(frozen=True)
class Case:
    """A run of ours, by its config and changes of it.

    Attributes:
        demo: whose shards are made; empty: `changes` name shards that are there.
        device: that both sides compute on.
        recorded: steps of our loader whose microbatches the reference goes through again and again.
        steps: steps of a block, by default.
    """

    config: str
    demo: str
    changes: tuple[str, ...]
    processes: int = 1
    device: str = "cpu"
    recorded: int = 24
    steps: int = 4


def sizes(tower: tuple[int, int, int], language: tuple[int, int, int, int], *more: str) -> tuple[str, ...]:
    """Overrides of `vlm_digits`: (layers, width, heads) of the tower, of the language model with its inner width."""
    encoder, llm = "modules.images.encoder", "modules.language.llm"
    layers, width, heads = tower
    values = {f"{encoder}.num_layers": layers, f"{encoder}.hidden_size": width, f"{encoder}.num_attention_heads": heads}
    values |= {f"{encoder}.ffn_hidden_size": 4 * width, f"{encoder}.init_std": 0.03, f"{encoder}.image_size": 64}
    layers, width, heads, inner = language
    values |= {f"{llm}.num_layers": layers, f"{llm}.hidden_size": width, f"{llm}.num_attention_heads": heads}
    values[f"{llm}.num_query_groups"] = heads
    values |= {f"{llm}.ffn_hidden_size": inner, f"{llm}.init_std": 0.03}
    return ("layout=one_process", *(f"{key}={value}" for key, value in values.items()), *more)


SMALL_BATCH = ("train.global_batch_size=8", "train.micro_batch_size=4")

CASES = {
    "demo": Case("vlm_digits", "digits", ("layout=one_process",)),
    "vlm_23m": Case("vlm_digits", "digits", sizes((6, 256, 8), (7, 448, 8, 1216), *SMALL_BATCH), steps=1),
    "vlm_100m": Case("vlm_digits", "digits", sizes((8, 512, 8), (10, 832, 13, 2240), *SMALL_BATCH), steps=1),
    "gpt": Case("gpt_tiny", "text", ()),
    "gpt_dp2": Case("gpt_tiny", "text", ("layout=language_dp2", "train.micro_batch_size=4"), processes=2),
}


def config_of(case: Case, folder: Path, name: str) -> ConfigContainer:
    """The run of a side, in a folder of its own, over shards that all share."""
    places = (f"run.dir={folder}/{name}", f"data.shards={folder}/train", "data.validation_shards=")
    fixed = (f"data.demo={case.demo}", f"run.device={case.device}", "train.iters=1000000", "checkpoint.save_interval=0")
    return load(case.config, (*places, *fixed, *case.changes))


def train_ours(case: Case, folder: Path, name: str, turns: Turns, prepare: Callable[[], None] | None = None) -> None:
    """Our training loop, with everything that it does by default, behind what `prepare` does in its process."""
    from benchmarks.stepped_run import SteppedRun
    from mimo_train.training.callbacks import Callback, Callbacks
    from mimo_train.training.loop import train

    class Wait(Callback):
        def on_step_start(self, state: Any) -> None:
            turns.before_step()

    if prepare:
        prepare()
    run = SteppedRun(config_of(case, folder, name))
    train(run.session, run.step_func, Callbacks([Wait()]))


def record_batches(case: Case, folder: Path, name: str, turns: Turns) -> None:
    """Write the microbatches of this rank's first steps, and what the reference needs to be as large as ours."""
    from benchmarks.stepped_run import SteppedRun

    run = SteppedRun(config_of(case, folder, name))
    steps = []
    for _ in range(case.recorded):
        run.step()
        steps.append([plain_batch(microbatch) for microbatch in run.session.data.current.microbatches])
    (embedding,) = (value for key, value in run.model[0].named_parameters() if key.endswith("word_embeddings.weight"))
    torch.save({"steps": steps, "rows": embedding.shape[0]}, recorded(folder))
    run.close()
    turns.before_step()


def recorded(folder: Path) -> Path:
    """The file of this rank."""
    return folder / f"batches_{os.environ['RANK']}.pt"


def plain_batch(microbatch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A microbatch as `transformers` takes it: labels at the places of their tokens, -100 where there is no loss."""
    labels = torch.where(microbatch["loss_mask"] > 0, microbatch["labels"], -100)
    none = torch.full_like(labels[:, :1], -100)
    batch = {"input_ids": microbatch["input_ids"], "labels": torch.cat([none, labels[:, :-1]], dim=1)}
    for inputs in (microbatch.get("modality_inputs") or {}).values():
        if inputs is not None:  # of a microbatch with images
            (encoder,) = inputs.values()
            batch["pixel_values"] = encoder["pixels"]
    return {key: value.to("cpu", copy=True) for key, value in batch.items()}


def reference_model(cfg: ConfigContainer, rows: int, placeholder: int) -> torch.nn.Module:
    """LLaVA, or a Llama where the run has no encoder, of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration
    from transformers import SiglipVisionConfig as TowerConfig

    llm = cfg.llm
    language = LlamaConfig(
        vocab_size=rows,
        hidden_size=llm.hidden_size,
        intermediate_size=llm.ffn_hidden_size,
        num_hidden_layers=llm.num_layers,
        num_attention_heads=llm.num_attention_heads,
        num_key_value_heads=llm.key_heads,
        head_dim=llm.head_width,
        tie_word_embeddings=llm.tie_embeddings,
        rms_norm_eps=llm.layernorm_epsilon,
        max_position_embeddings=cfg.data.sequence_length,
        initializer_range=llm.init_std,
        attn_implementation="sdpa",
        use_cache=False,
    )
    if not cfg.encoders:
        return LlamaForCausalLM(language)
    (module,) = cfg.encoders.values()
    encoder = module.encoder
    tower = TowerConfig(
        hidden_size=encoder.hidden_size,
        intermediate_size=encoder.ffn_hidden_size,
        num_hidden_layers=encoder.num_layers,
        num_attention_heads=encoder.num_attention_heads,
        image_size=encoder.image_size,
        patch_size=encoder.patch_size,
        vision_use_head=False,
        attn_implementation="sdpa",
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=language,
        image_token_index=placeholder,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        tie_word_embeddings=llm.tie_embeddings,
        attn_implementation="sdpa",
    )
    return LlavaForConditionalGeneration(config)


def train_reference(case: Case, folder: Path, name: str, turns: Turns, compiled: str = "", reads: bool = False) -> None:
    """The loop of a user of `transformers`; in bf16 under autocast, with weights of fp32, as its `Trainer` has it.

    Args:
        compiled: backend of torch.compile for the whole model; empty: it is not compiled.
        reads: whether it also reads and decodes a step's samples.
    """
    from mimo_train.inputs.datasets import placeholders_of, tokenizer_of

    if compiled:
        from torch._dynamo.utils import counters
    saved = torch.load(recorded(folder), weights_only=True)
    cfg = config_of(case, folder, name)
    placeholders, tokenizer = placeholders_of(cfg), tokenizer_of(cfg)
    ids = [tokenizer.placeholder_id(placeholder) for placeholder in placeholders.values()]
    torch.manual_seed(1)
    model = reference_model(cfg, saved["rows"], next(iter(ids), -1)).train().to(case.device)
    if cfg.train.recompute == "full":
        model.gradient_checkpointing_enable()
    wrapped = torch.compile(model, backend=compiled) if compiled else model
    if case.processes > 1:
        dist.init_process_group("gloo")
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    weights = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    normalize, half = normalization(cfg), cfg.train.precision == "bf16"
    own = cfg.train.global_batch_size // case.processes
    samples = read_steps(Path(cfg.data.shards), own, tokenizer, cfg.data.sequence_length) if reads else None
    while True:
        for step in saved["steps"]:
            turns.before_step()
            if samples is not None:
                next(samples)
            optimizer.zero_grad(set_to_none=True)
            tokens = sum((batch["labels"] != -100).sum() for batch in step).float().to(case.device)
            if case.processes > 1:
                dist.all_reduce(tokens)
                tokens /= case.processes  # DDP averages
            total = torch.zeros((), device=case.device)
            for number, batch in enumerate(step):
                inputs = {key: value.to(case.device) for key, value in batch.items()}
                if "pixel_values" in inputs:
                    inputs["pixel_values"] = normalize(inputs["pixel_values"])
                last = number == len(step) - 1
                with contextlib.nullcontext() if last or case.processes == 1 else wrapped.no_sync():
                    with torch.autocast(case.device, torch.bfloat16, enabled=half):
                        loss = wrapped(**inputs, num_items_in_batch=tokens).loss
                    loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if compiled and not counters["stats"]["unique_graphs"]:
                raise RuntimeError("torch.compile has compiled nothing")


def normalization(cfg: ConfigContainer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of pixels, as our encoder does it."""
    if not cfg.encoders:
        return lambda pixels: pixels
    (module,) = cfg.encoders.values()
    mean, std = (
        torch.tensor(values, device=cfg.run.device).view(1, 3, 1, 1)
        for values in (module.encoder.pixel_mean, module.encoder.pixel_std)
    )
    return lambda pixels: (pixels.float() / 255 - mean) / std


@contextlib.contextmanager
def open_sides(
    case: Case,
    folder: Path,
    compiled: str = "",
    prepare: Callable[[], None] | None = None,
    reads: bool = False,
    kernels_off: bool = False,
) -> Iterator[list[Side]]:
    """The reference (see `train_reference`) and ours (see `train_ours`), each past its first steps. With `kernels_off`
    a third side is ours with run.cpu_kernels=false."""
    if case.demo:
        from data.demo.make import make_demo

        make_demo(folder, case.demo)

    def side(name: str, run: Callable[..., None], case: Case = case) -> Side:
        options = {"processes": case.processes, "device": case.device}
        return Side(name, partial(run, case, folder, name), folder, **options)

    side("recorder", record_batches).close()
    with contextlib.ExitStack() as stack:
        reference, ours = partial(train_reference, compiled=compiled, reads=reads), partial(train_ours, prepare=prepare)
        sides = [stack.enter_context(side("transformers", reference)), stack.enter_context(side("mimo-train", ours))]
        if kernels_off:
            off = replace(case, changes=(*case.changes, "run.cpu_kernels=false"))
            sides.append(stack.enter_context(side("kernels off", ours, off)))
        for each in sides:
            each.block(FIRST_STEPS)
        yield sides


def main() -> int:
    """Measure cases in turn, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=(*CASES, "all"), metavar="CASE")
    parser.add_argument("--blocks", type=int, default=30, help="rounds of a block of each side (default: 30)")
    parser.add_argument("--steps", type=int, help="steps of a block (default: 4; 1 of vlm_23m and vlm_100m)")
    parser.add_argument("--reads", action="store_true", help="let the reference read and decode samples, too")
    parser.add_argument("--kernels-off", action="store_true", help="add a side of ours with run.cpu_kernels=false")
    parser.add_argument("--keep", metavar="DIR", help="work in this folder, and keep its logs")
    args = parser.parse_args()
    import_everything()
    for name in CASES if "all" in args.cases else args.cases:
        case = CASES[name]
        steps = args.steps or case.steps
        with contextlib.ExitStack() as stack:
            folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory())).resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            sides = stack.enter_context(open_sides(case, folder, reads=args.reads, kernels_off=args.kernels_off))
            blocks = take_turns(sides, args.blocks, steps)
        title = f"{name}, where both read," if args.reads else name
        print(f"{title} {args.blocks} blocks of {steps} steps; of a step: all threads | main thread | memory")
        print(summary(blocks), flush=True)
    return 0


def import_everything() -> None:
    """What the sides need, before they are forked."""
    from mimo_train.preflight.dry_run.one_rank import import_program

    for name in ("llama", "llava", "siglip"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    import_module("mimo_train.training.pretrain")
    import_program()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
