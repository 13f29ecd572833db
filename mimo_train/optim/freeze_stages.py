"""Freeze stages: parameters of `modules.NAME.freeze_until` are frozen until a step and trainable from then on."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.ranks import RunLayout
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel.bridge.shapes import Needs
from mimo_train.parallel.groups import RunGroups


class FreezeStages:
    """Freezes parameters until their step.

    Until then they require no gradient, so nothing is computed for them in backward; their part of the gradient buffer
    stays zero, and the optimizer does not change them. The learning rate follows the run's steps: a part that is
    released late starts with the rate of that step, without its own warm-up.
    """

    def __init__(
        self, cfg: ConfigContainer, optimizer: ModuleOptimizer, on_step: Callable[[int], None] = lambda step: None
    ):
        """Freeze what the first step does not train; `apply` releases it, also in a resumed run.

        Args:
            on_step: called at the start of every step, with the steps done.
        """
        self._optimizer, self._on_step = optimizer, on_step
        self._steps = sorted({step for module in cfg.modules.values() for step in module.freeze_until.values()} - {0})
        self._waiting: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, step in optimizer.releases.items():
            parameter.requires_grad_(False)
            self._waiting.setdefault(step, []).append(parameter)

    def apply(self, step: int) -> None:
        """Release the parameters that are trained from `step` on. Called at the start of every step, after loading.

        Args:
            step: steps done, including those of earlier jobs.
        """
        while self._steps and self._steps[0] <= step:
            released = self._steps.pop(0)
            for parameter in self._waiting.pop(released, []):
                parameter.requires_grad_(True)
            self._optimizer.release(released)
        self._on_step(step)


class GradientNeeds:
    """From which step on each stage of each module that gives features needs gradients; the same on every rank."""

    def __init__(
        self,
        layout: RunLayout,
        modules: dict[str, list[MegatronModule]],
        releases: dict[torch.nn.Parameter, int],
        groups: RunGroups,
    ):
        """Collective over all ranks, before `FreezeStages` freezes anything.

        Args:
            modules: the chunks of the modules of this rank.
            releases: the step from which parameters are trained that are not from the first on.
        """
        own: dict[tuple[str, int, bool], int] = {}
        sources = {edge.source for edge in layout.edges}
        for name, chunks in modules.items():
            for chunk in chunks if name in sources else ():
                for parameter_name, parameter in unwrap_model(chunk).named_parameters():
                    if parameter.requires_grad:
                        place = name, groups.collections[name].pp.rank(), parameter_name.startswith("encoders.")
                        step = releases.get(parameter, 0)
                        own[place] = min(step, own.get(place, step))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self._first_steps: dict[tuple[str, int, bool], int] = {}
        for found in everyone:
            for place, step in found.items():
                self._first_steps[place] = min(step, self._first_steps.get(place, step))
        self._stages = {name: layout.modules[name].pp for name in layout.modules if name in sources}

    def at(self, step: int) -> dict[str, Needs]:
        """Which sources need gradients after `step` steps."""
        trained = {place for place, first in self._first_steps.items() if first <= step}
        return {
            name: Needs(
                stages=tuple(
                    any((name, before, True) in trained for before in range(stage + 1)) for stage in range(stages)
                ),
                features=any(place[0] == name for place in trained),
            )
            for name, stages in self._stages.items()
        }
