"""The pipeline of a run: stages that a microbatch passes, how long ranks wait, what is in flight. Imports no torch."""

from mimo_train.layout.layout import RunLayout
from mimo_train.layout.run import Run


def stages_to_end(layout: RunLayout, name: str, stage: int) -> int:
    """Pipeline stages from this stage of a module to the end of the longest way that its features take, itself
    included. A module inside the first stage of another is at that stage."""
    edges = layout.edges_from(name)
    behind = max((stages_to_end(layout, edge.destination, 0) for edge in edges), default=0)
    if any(edge.is_shared for edge in edges):
        return behind
    return layout.modules[name].pp - stage + behind


def pipeline_stages(layout: RunLayout) -> int:
    """Stages that a microbatch passes on the longest way through the modules."""
    return max(stages_to_end(layout, name, 0) for name in layout.modules)


def bubble(run: Run) -> float:
    """Share of a step in which a rank waits for the pipeline to fill and drain: (p - 1) / (v m + p - 1) for p stages of
    equal duration, v chunks a stage and m microbatches. Narayanan et al. 2021 (arXiv 2104.04473) give (p - 1) / (v m),
    of the time without the bubble."""
    stages, chunks = pipeline_stages(run.layout), run.layout.language.vpp * run.batch.num_microbatches
    return (stages - 1) / (chunks + stages - 1)


def in_flight(run: Run, name: str, stage: int) -> int:
    """Microbatches between forward and backward on a stage: as many as stages are left, at most m, under the 1F1B
    schedule. Interleaved in v chunks a stage, those of one chunk each: min(v m, 2 (stages - stage - 1) + (v - 1) stages
    + 1), the warm-up of Megatron-Core 0.19.2 (schedules.py:902) and one more."""
    chunks = run.layout.language.vpp
    if chunks > 1:
        stages = pipeline_stages(run.layout)
        return min(chunks * run.batch.num_microbatches, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
    return min(run.batch.num_microbatches, stages_to_end(run.layout, name, stage))
