"""Which modules on other ranks need gradients: in a run those ranks say so, here the config does.

A pattern of `freeze` counts as one that leaves something to train in its part.
"""

from collections.abc import Iterator
from typing import Any

from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import module_parameters
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.layout.run import Run


def places(cfg: ConfigContainer, module: ModuleLayout) -> Iterator[tuple[tuple[str, int, bool], int]]:
    """((module, stage, whether it is the encoder), step from which it is trained) of what is trained at all."""
    until = cfg.modules[module.name].freeze_until
    for stage in range(module.pp):
        for part, count in module_parameters(cfg, module.name, 0, tp=module.tp, stage=stage, stages=module.pp).items():
            if count.trainable:
                yield (module.name, stage, part != "projector"), until.get(part, 0)


def install(run: Run) -> None:
    """Let the config say it, for the rest of this process."""
    from mimo_train.training import setup as setting_up

    class Needs(setting_up.GradientNeeds):
        def __init__(self, layout: Any, modules: Any, releases: Any, groups: Any):
            super().__init__(layout, modules, releases, groups)
            own = {(name, groups.collections[name].pp.rank()) for name in modules}
            for name in self._stages:
                for place, step in places(run.cfg, layout.modules[name]):
                    if place[:2] not in own:
                        self._first_steps.setdefault(place, step)

    setting_up.GradientNeeds = Needs  # type: ignore[misc]
