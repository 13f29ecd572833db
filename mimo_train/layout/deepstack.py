"""What features for layers of the language model need of a layout (DeepStack). Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.errors import Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.layout import layers_of_stage


def deepstack_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Modules and layouts that cannot carry the features which an encoder has for layers of the language model: they
    arrive with those for its input, on its first stage."""
    llm, stages = cfg.llm, cfg.language.layout.pp
    first = layers_of_stage(llm.num_layers, 0, stages)
    for name, module in cfg.encoders.items():
        layers = len(module.encoder.deepstack)
        if not layers:
            continue
        key = f"modules.{name}"
        if first < layers:
            yield Fault(
                f"modules.{LANGUAGE}.layout.pp",
                f"{key} gives features to the first {layers} layers, and the first of {stages} stages has {first} of "
                f"{llm.num_layers}: lower pp",
            )
        if module.encoder.deepstack_width != llm.hidden_size:
            yield Fault(
                f"{key}.encoder.deepstack_width",
                f"must be modules.{LANGUAGE}.llm.hidden_size {llm.hidden_size}, is {module.encoder.deepstack_width}",
            )
        if module.layout.pp > 1:
            yield Fault(
                f"{key}.layout.pp",
                f"features of encoder.deepstack {module.encoder.deepstack} come from layers of all stages, and one "
                f"sends its last states alone: set pp to 1 (is {module.layout.pp})",
            )
        if module.projector.latents:
            yield Fault(
                f"{key}.projector.kind",
                f"makes {module.projector.latents} tokens of each {module.encoder.medium}, and features of encoder."
                "deepstack belong to those of patches: use mlp or linear, or set encoder.deepstack to []",
            )
