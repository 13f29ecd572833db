"""Warm-up against the length of a run. Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.schema import ConfigContainer


def warm_up_warnings(cfg: ConfigContainer) -> Iterator[str]:
    """Modules whose learning rate never reaches its peak. That is no fault: a run of a few steps, to try a config, is
    such a one."""
    steps_of = {"optim": cfg.optim.warmup_iters}
    steps_of |= {f"modules.{name}.optim": module.optim.warmup_iters or 0 for name, module in cfg.modules.items()}
    for key, steps in steps_of.items():
        if steps > cfg.train.iters:
            yield (
                f"{key}.warmup_iters {steps} is longer than train.iters {cfg.train.iters}: the learning rate never "
                "reaches its peak; lower it, unless this run is a trial"
            )
