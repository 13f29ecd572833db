"""What `data.shuffle_block` makes of the order of a run's samples."""

from data.text_format import plural
from mimo_train.config.schema import ConfigContainer
from mimo_train.preflight.check.findings import Report


def add_blocks(report: Report, cfg: ConfigContainer, samples: int, rows: list[tuple[str, str, str]]) -> None:
    """Says how many blocks an epoch of `samples` samples and a step have, and warns of few."""
    block, step = cfg.data.shuffle_block, cfg.train.global_batch_size
    blocks = -(-samples // block)
    if block == 1:
        return
    rows.append(("data.shuffle_block", f"{block}", f"{blocks:,} blocks an epoch, about {step / block:.3g} a step"))
    if blocks < 2:
        report.warnings.append(
            f"data.shuffle_block: {block} is not less than the {samples:,} training samples: every epoch is in the "
            "order of the shards"
        )
    elif step < 4 * block:
        report.warnings.append(
            f"data.shuffle_block: a step of {plural(step, 'sample')} has less than 4 blocks of {block} neighbours: "
            "lower it, or "
            "raise train.global_batch_size, unless the shards' samples are shuffled well"
        )
