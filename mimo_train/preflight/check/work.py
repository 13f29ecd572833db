"""The table of work: floating point operations of each kind of rank in a step, and so who waits for whom. Imports no
torch."""

from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.placement import span_text
from mimo_train.layout.run import Run
from mimo_train.preflight.check.findings import Report, Table
from mimo_train.preflight.plan.work import module_work

_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (0.0, "FLOP"))


def flops_of_ranks(run: Run, vocab: int, media_per_sample: dict[str, float]) -> dict[range, dict[str, float]]:
    """FLOPs of a step of one rank, with what is computed again: ranks that do the same -> module and stage, as
    `RunLayout.kind_of` names it -> FLOPs.

    Every row is full and every picture the largest; every part is trained that is at the end of the run. Ranks of tp,
    cp and ep share the work of their replica evenly.

    Args:
        vocab: rows of the embedding.
        media_per_sample: pictures or clips in a sample, by encoder; 1 of those that are not named.
    """
    found: dict[range, dict[str, float]] = {}
    for name, module in run.layout.modules.items():
        work = module_work(run.cfg, name, vocab, media_per_sample.get(name, 1.0))
        samples = run.batch.global_batch_size / (module.dp * module.tp * module.cp)
        for stage in range(module.pp):
            title = f"{name}, stage {stage + 1} of {module.pp}" if module.pp > 1 else name
            flops = samples * work.of_stage(stage, module.pp, module.vpp).total
            found.setdefault(module.stage_ranks(stage), {})[title] = flops
    return found


def add_work(report: Report, run: Run, vocab: int | None, media_per_sample: dict[str, float]) -> None:
    """One row per kind of rank. `vocab`: None if it is not known."""
    found = flops_of_ranks(run, vocab or 0, media_per_sample)
    most = max(sum(modules.values()) for modules in found.values())
    rows = []
    for ranks, modules in sorted(found.items(), key=lambda one: one[0].start):
        own = sum(modules.values())
        several = len(modules) > 1 and own  # nothing, where the first samples have no pictures
        parts = [f"{name} ({part / own:.0%})" if several else name for name, part in modules.items()]
        where = span_text(run.layout.processes_of(ranks))
        rows.append((" + ".join(parts), where, flops_text(own), f"{own / most:.0%}"))
    notes = ["forward, backward and what is recomputed, every row full; ranks with less than the busiest wait for it"]
    if vocab is None:
        notes.append(f"without the output layer of {LANGUAGE}: the size of the vocabulary is not known")
    header = ("modules", "ranks", "a step", "of the busiest")
    report.tables.append(Table("Work of a rank (FLOPs)", header, rows, notes, left=2))


def flops_text(flops: float) -> str:
    """For people: 350 MFLOP, 1,250 PFLOP."""
    size, unit = next(one for one in _UNITS if flops >= one[0])
    number = flops / (size or 1.0)
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
