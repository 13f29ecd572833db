"""Finds the microbatch, direction, module, rank and layer where a non-finite value originates.

The step's microbatches are rerun one at a time, with forward hooks on every layer and gradient hooks on its inputs and
outputs. Full-backward hooks turn a layer's output into a view, which Megatron-Core 0.19.2 rejects between pipeline
stages (schedules.py, deallocate_output_tensor).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mimo_train.config.parts import LANGUAGE
from mimo_train.debug.nan_findings import are_finite, bad_gradients, bad_losses
from mimo_train.models.parameters import layers_of, modules_of
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Pipeline

FORWARD, LOSS, BACKWARD = "forward", "loss function", "backward"
"""Where a non-finite value can originate, in the order of a microbatch."""


class Place(NamedTuple):
    """A layer of a module on this rank, with the name of `layers_of`, or "" for the loss function; `stage` counts the
    module's model chunks in the order of forward."""

    module: str
    stage: int
    layer: str


class Sighting(NamedTuple):
    """The first non-finite value of a microbatch on a rank; `begins` and `weights` as in `Origin`. `depth` counts the
    layers of this rank before it: with context parallelism, attention carries values to other ranks later."""

    direction: str
    place: Place
    begins: bool
    weights: bool
    rank: int
    depth: int = 0


@dataclass(frozen=True)
class Origin:
    """The origin that all ranks agreed on."""

    microbatch: int
    direction: str
    module: str
    layer: str
    """Empty for the loss function."""
    ranks: list[int]
    begins: bool
    """True if the layer's input (in backward: the gradient of its output) was finite."""
    weights: bool
    """True if the layer's weights are finite."""

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        where = f"begins in microbatch {self.microbatch}, {self.direction}, module {self.module}, {ranks}"
        if self.direction == LOSS:
            return f"{where}: the output of every layer is finite"
        taken = "its input" if self.direction == FORWARD else "the gradient that reaches it"
        how = f"{taken} is {'finite' if self.begins else 'not finite already'}"
        return f"{where}, layer {self.layer}: {how}{'' if self.weights else ', its weights are not finite'}"


def bisect(
    forward_backward: Callable[[StepIterator, int], None], pipeline: Pipeline, losses: StepLosses, data: StepIterator
) -> Origin | None:
    """Run the microbatches of the current step one at a time until one has a non-finite value. Collective.

    Returns:
        The origin, equal on all ranks; None if every microbatch alone is finite.
    """
    # The interleaved schedule needs as many microbatches as stages: repeat the same one.
    language = pipeline.layout.language
    copies = language.pp if language.vpp > 1 else 1
    for microbatch in range(len(data.current.microbatches)):
        data.rewind([microbatch] * copies)
        with LayerHooks(pipeline) as hooks:
            forward_backward(data, copies)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, hooks.first(any(bad_losses(losses, data))))
        sightings = [sighting for sighting in everyone if sighting is not None]
        if sightings:
            return _origin(microbatch, sightings, list(pipeline.layout.modules))
    return None


class LayerHooks:
    """Hooks on every layer of this rank, active inside a `with` block; records non-finite values in order of time."""

    def __init__(self, pipeline: Pipeline):
        self._model = pipeline.model
        self._handles: list[RemovableHandle] = []
        self._layers: dict[Place, torch.nn.Module] = {}
        self._forward: list[tuple[Place, bool]] = []
        self._gradients: list[tuple[Place, str]] = []
        for module, chunks in modules_of(pipeline.model).items():
            pp = pipeline.groups.collections[module].pp
            for number, chunk in enumerate(chunks):
                for name, layer in layers_of(chunk):
                    self._layers[Place(module, number * pp.size() + pp.rank(), name)] = layer

    def __enter__(self) -> "LayerHooks":
        for place, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(partial(self._look, place), with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def first(self, bad_loss: bool) -> Sighting | None:
        """Return the first non-finite value of this rank, or None; `bad_loss` if a loss of this rank is not finite."""
        if self._forward:
            # At the origin the layer's input is finite; an input of the module may be bad before any layer.
            place, begins = self._forward[0]
            return self._sighting(FORWARD, place, begins)
        if bad_loss:
            stage = max(place.stage for place in self._layers if place.module == LANGUAGE)
            return Sighting(LOSS, Place(LANGUAGE, stage, ""), True, True, dist.get_rank())
        reached: set[Place] = set()
        for place, side in self._gradients:
            if side == "output":
                reached.add(place)
            elif place not in reached:
                return self._sighting(BACKWARD, place, True)
        if self._gradients:
            return self._sighting(BACKWARD, self._gradients[0][0], False)
        bad = bad_gradients(self._model)
        for place in reversed(self._layers):  # the last layer is the first in backward
            if any(name.startswith(f"{place.layer}.") for name in bad.get(place.module, ())):
                return self._sighting(BACKWARD, place, True)
        for module, names in bad.items():  # weights outside of layers
            return Sighting(BACKWARD, Place(module, 0, names[0]), True, True, dist.get_rank())
        return None

    def _look(self, place: Place, layer: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        inputs, outputs = _values((args, kwargs)), _values(output)
        if not all(are_finite(outputs)):
            self._forward.append((place, all(are_finite(inputs))))
        for side, tensors in (("output", outputs), ("input", inputs)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, place, side))

    def _look_at_gradient(self, place: Place, side: str, gradient: torch.Tensor) -> None:
        if not all(are_finite([gradient])):
            self._gradients.append((place, side))

    def _sighting(self, direction: str, place: Place, begins: bool) -> Sighting:
        weights = all(are_finite(self._layers[place].parameters()))
        return Sighting(direction, place, begins, weights, dist.get_rank(), list(self._layers).index(place))


def _values(tree: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors that layers exchange, without weights passed to a layer."""
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not isinstance(leaf, torch.nn.Parameter)
    ]


def _origin(microbatch: int, sightings: list[Sighting], modules: list[str]) -> Origin:
    """Return the first sighting in the order of a microbatch: encoders, stages of the language model, loss, and back.
    Ranks that share a layer agree, but only some of them may have the bad weights or the origin."""

    def order(sighting: Sighting) -> tuple:
        direction = (FORWARD, LOSS, BACKWARD).index(sighting.direction)
        module, stage = sighting.place.module, sighting.place.stage
        place: tuple[int, ...] = (module == LANGUAGE, modules.index(module), stage, sighting.depth)
        if sighting.direction == BACKWARD:
            place = tuple(-number for number in place)
        return direction, *place, sighting.weights, not sighting.begins

    first = min(sightings, key=order)
    place = first.place
    ranks = [each.rank for each in sightings if order(each) == order(first) and each.place == place]
    return Origin(microbatch, first.direction, place.module, place.layer, ranks, first.begins, first.weights)
