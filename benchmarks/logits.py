"""Time of a step with logits where a loss is, beside one with logits everywhere (`train.logits`); their steps alternate
in one run.

    OMP_NUM_THREADS=1 python benchmarks/logits.py layout=one_process [--rounds 10] [key=value ...]
    ... benchmarks/logits.py --config gpt_tiny layout=language_one           # any config of one process

Printed are medians over rounds of a step's processor time, of all its threads, and their ratio of the same round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from mimo_train.config.compose import load

VOCABULARY = "modules.language.llm.vocab_size=32768"
LEARNED, ALL = "learned", "all"


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--config", default="vlm_digits")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fixed = (f"run.dir={folder}/run", "run.device=cpu", "data.workers=0", "log.tensorboard=false")
        steps = f"train.iters={2 * (args.rounds + 1)}"
        measure(args.config, (VOCABULARY, *fixed, steps, *args.overrides), args.rounds)


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
