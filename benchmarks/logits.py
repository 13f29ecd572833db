"""Cost of logits.

    OMP_NUM_THREADS=1 python -m benchmarks.logits loss [--tokens 4096] [--vocabulary 32768] [--hidden 512]
    python -m benchmarks.logits dry                     # a dry run of 8,192 tokens at a vocabulary of 152,064
    OMP_NUM_THREADS=1 python -m benchmarks.logits step layout=one_process [--rounds 10] [--config NAME] [key=value ...]

`loss` prints the peak of the process and its processor time (forward, backward; the best of `--rounds`) for the loss of
tokens with stored logits, and without (`train.max_logits_mib`), of a trained and of a frozen output layer; each in a
process of its own. `dry` prints the bytes of a step at its peak, both ways. `step` compares a step with logits where a
loss is with one that has them everywhere (`train.logits`): medians over rounds of processor time, and their ratio of
the same round.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from mimo_train.config.compose import load

VOCABULARY = "modules.language.llm.vocab_size=32768"
LEARNED, ALL = "learned", "all"
DRY = (
    *("layout=language_one", "train.precision=bf16", "train.micro_batch_size=1", "train.global_batch_size=2"),
    *("data.sequence_length=8192", "data.pad=sequence", "train.logits=all", "modules.language.llm.vocab_size=152064"),
    *(
        "modules.language.llm.hidden_size=512",
        "modules.language.llm.num_attention_heads=8",
        "modules.language.llm.ffn_hidden_size=1024",
    ),
    *("modules.language.llm.max_positions=8192", "modules.language.llm.num_layers=1", "train.eval_interval=0"),
)


def main() -> None:
    """Print the numbers of a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["loss", "dry", "step"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", default="vlm_digits")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.part == "loss":
        sizes = (args.tokens, args.vocabulary, args.hidden)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for dtype in ("bfloat16", "float32"):
                for way in ("stored", "blocks", "frozen, stored", "frozen, blocks"):
                    print(pool.apply(loss, (way, *sizes, dtype, args.rounds)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        fixed = (f"run.dir={folder}/run", "run.device=cpu", "data.workers=0", "log.tensorboard=false")
        if args.part == "dry":
            dry((f"run.dir={folder}/run", *DRY, *args.overrides))
        else:
            steps = f"train.iters={2 * (args.rounds + 1)}"
            measure(args.config, (VOCABULARY, *fixed, steps, *args.overrides), args.rounds)


def loss(way: str, tokens: int, vocabulary: int, hidden: int, dtype: str, rounds: int) -> str:
    """Measure one way in this process."""
    import torch
    import torch.nn.functional as F

    from mimo_train.cpu.kernels import cross_entropy
    from mimo_train.models.output.token_losses import token_losses
    from mimo_train.models.output.vocabulary import Vocabulary

    torch.set_num_threads(1)
    generator, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    x = torch.randn(tokens, hidden, generator=generator).to(kind).requires_grad_()
    w = (torch.randn(vocabulary, hidden, generator=generator) * 2 / hidden**0.5).to(kind)
    w.requires_grad_("frozen" not in way)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    rows = Vocabulary(SimpleNamespace(size=lambda: 1, rank=lambda: 0), vocabulary)  # type: ignore[arg-type]

    def losses(count: int) -> torch.Tensor:
        if "stored" in way:
            return cross_entropy(F.linear(x[:count], w), labels[:count])
        return token_losses(x[:count], w, labels[:count], rows)[0]

    losses(32).sum().backward()  # what only the first call allocates
    times, peak = [], 0.0
    for _ in range(rounds):
        x.grad = w.grad = None
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before, began = _status("VmRSS"), time.process_time()
        result = losses(tokens)
        middle = time.process_time()
        result.sum().backward()
        times.append((middle - began, time.process_time() - middle))
        peak = _status("VmHWM") - before
        del result
    forward, backward = min(times, key=sum)
    return (
        f"{dtype:9} {way:15} peak {peak:5.0f} MiB, forward {forward:5.2f} s, backward {backward:5.2f} s, sum "
        f"{forward + backward:5.2f} s"
    )


def _status(name: str) -> float:
    """Return a number of MiB of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def dry(overrides: tuple[str, ...]) -> None:
    """Print the bytes at the peak of a step with stored logits and without, and what `check` estimates."""
    from mimo_train.estimate.memory import rank_memory, run_memory
    from mimo_train.layout.run import resolve
    from mimo_train.preflight.dry_run.command import in_child
    from mimo_train.preflight.dry_run.observation import RankFailure, kinds_of

    for name, most in (("stored", 2**20), ("blocks", 256)):
        run = resolve(load("gpt_tiny", (*overrides, f"train.max_logits_mib={most}")))
        result = in_child(run, kinds_of(run.layout)[0])
        if isinstance(result, RankFailure):
            raise SystemExit(result.what + result.trace)
        parts = {part: size / 2**20 for part, size in result.categories.items()}
        states = sum(parts.get(part, 0.0) for part in ("weights", "gradients", "optimizer"))
        (estimate,) = rank_memory(run_memory(run, run.cfg.llm.vocab_size)).values()
        estimated = (estimate.activations + estimate.work) / 2**20
        print(
            f"{name}: peak {result.peak / 2**20:,.0f} MiB, without weights and optimizer "
            f"{result.peak / 2**20 - states:,.0f} MiB (estimated {estimated:,.0f}), of the output layer "
            f"{parts.get('logits', 0.0):,.0f} MiB"
        )


def measure(config: str, overrides: tuple[str, ...], rounds: int) -> None:
    """Make a step of each kind in turn; the first of each is not counted."""
    from benchmarks.stepped_run import SteppedRun
    from mimo_train.training.pretrain import default_forward_step

    cfg = load(config, overrides)
    forward_step, way = default_forward_step(cfg), LEARNED

    def chosen(state: Any, data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
        batches = ({key: value for key, value in batch.items() if way == LEARNED or key != "learned"}
                   for batch in data_iterator)  # fmt: skip
        return forward_step(state, batches, model)

    run = SteppedRun(cfg, chosen)
    found: dict[str, list[float]] = {LEARNED: [], ALL: []}
    shares = []
    for number in range(rounds + 1):
        for way in (LEARNED, ALL) if number % 2 else (ALL, LEARNED):
            began = time.process_time()
            run.step()
            if number:
                found[way].append(time.process_time() - began)
            masks = [one["loss_mask"] for one in run.session.data.current.microbatches]
            shares.append(float(sum(mask.sum() for mask in masks)) / sum(mask.numel() for mask in masks))
    run.close()
    print(f"{config}: {statistics.mean(shares):.3f} of all positions have a loss")
    for way, times in found.items():
        print(f"train.logits={way}: {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    ratios = [a / b for a, b in zip(found[LEARNED], found[ALL], strict=True)]
    print(f"{LEARNED} / {ALL}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
