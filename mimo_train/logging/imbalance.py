"""How unevenly the work of a step is divided over the data-parallel ranks of each module: ranks with less wait."""

from collections.abc import Callable, Mapping, Sequence

from data.order.step import StepBatch
from data.order.step_plan import Span
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.ranks import ModuleLayout, RunLayout


def imbalance(
    batch: StepBatch,
    layout: RunLayout,
    work_of_texts: Callable[[Mapping[int, int]], float],
    spans: Callable[[ModuleLayout, int], Sequence[Span]],
) -> dict[str, float]:
    """Work of the busiest data-parallel rank over the mean, of every module that has several and anything to do.

    Args:
        work_of_texts: FLOPs of the language model over texts by their lengths (`StepPlan.texts_of_length`).
        spans: samples of a microbatch that each data-parallel rank of an encoder computes (`StepShapes.spans`). Its
            work are tokens inside the encoder.

    Returns:
        {"imbalance/NAME": 1.0 where all have as much}; of the language model's two kinds of work also
        "imbalance_tokens/language", and "imbalance_attention/language" of the squares of the lengths of texts.
    """
    found = {}
    for name, module in layout.modules.items():
        if module.dp == 1:
            continue
        if name == LANGUAGE:
            of_ranks = batch.plan.texts_of_ranks()
            work = [work_of_texts(texts) for texts in of_ranks]
            for what, power in (("tokens", 1), ("attention", 2)):
                loads = [sum(length**power * number for length, number in texts.items()) for texts in of_ranks]
                found[f"imbalance_{what}/{name}"] = _busiest(loads)
        else:
            work = [0.0] * module.dp
            for microbatch, of_samples in enumerate(batch.loads[name]):
                for rank, (first, last) in enumerate(spans(module, microbatch)):
                    work[rank] += sum(of_samples[first:last])
        if any(work):
            found[f"imbalance/{name}"] = _busiest(work)
    return found


def _busiest(work: Sequence[float]) -> float:
    """The most over the mean."""
    return max(work) * len(work) / sum(work)
