"""Files of samples that are named more than once, or both for training and for evaluation."""

from collections import Counter

from data.errors import DataError
from data.storage.url import Place
from data.text_format import plural
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.inputs import held_out_sets, training_sources
from mimo_train.preflight.check.findings import Report


def add_repeats(report: Report, cfg: ConfigContainer) -> None:
    """Warnings of shards that are named more than once, or both for training and for evaluation."""
    from data.indexed.find import find_any

    files: dict[str, Counter[Place]] = {}
    training = [one.shards for one in training_sources(cfg)]
    others = [(one.key, [one.source.shards]) for one in held_out_sets(cfg) if not one.fraction]
    for key, patterns in [("data.mix" if cfg.data.mix else "data.shards", training), *others]:
        try:
            files[key] = Counter(path.resolve() for shards in patterns for path in find_any(shards))
        except (DataError, OSError):
            continue  # none, or a fault of its own
        twice = [path for path, times in files[key].items() if times > 1]
        if twice:
            report.warnings.append(
                f"{key}: {plural(len(twice), 'shard')}, such as {twice[0]}, "
                "named more than once: an epoch has their samples as often"
            )
        trained = "data.mix" if cfg.data.mix else "data.shards"
        both = sorted(files[trained] & files[key], key=str) if trained in files and key != trained else []
        if both:
            report.warnings.append(
                f"{key}: {plural(len(both), 'shard')}, such as {both[0]}, also in {trained}: "
                "the evaluation sees what was trained on"
            )
