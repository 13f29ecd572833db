"""Warm-up against the length of a run. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.schema import ConfigContainer


def warm_up_warnings(cfg: ConfigContainer, last_step: int | None = None) -> Iterator[str]:
    """Modules whose learning rate never reaches its peak. That is no fault: a run of a few steps, to try a config, is
    such a one.

    Args:
        last_step: of the run, where its data may end it before `train.iters`.
    """
    length = cfg.train.iters if last_step is None else last_step
    named = f"train.iters {length}" if length == cfg.train.iters else f"the {length} steps that the data lasts for"
    steps_of = {"optim": cfg.optim.warmup_iters}
    steps_of |= {f"modules.{name}.optim": module.optim.warmup_iters or 0 for name, module in cfg.modules.items()}
    for key, steps in steps_of.items():
        if steps >= length > 0:  # 0: not known yet
            # Step n has the rate of n - 1 steps of warm-up: the peak is that of the step behind it.
            compared = "longer than" if steps > length else "as long as"
            yield (
                f"{key}.warmup_iters {steps} is {compared} {named}: the learning rate never "
                "reaches its peak; lower it, unless this run is a trial"
            )
