"""What Megatron-Core 0.19.2's own bridges cannot carry (`placement.bridge=megatron`). Imports no torch."""

from collections.abc import Iterator

from mimo_train.config.fault import Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.layout import RunLayout


def bridge_faults(cfg: ConfigContainer, layout: RunLayout) -> Iterator[Fault]:
    """Why `placement.bridge` cannot carry this layout."""
    language = layout.language
    if cfg.placement.bridge != "megatron":
        return
    instead = "use placement.bridge=native"
    local = [edge.giver for edge in layout.shared_edges]
    apart = [edge.giver for edge in layout.disjoint_edges]
    if language.cp > 1 and cfg.encoders:
        # bridge_communicator.py:105-116, colocated_communicator.py:118-154
        yield Fault(
            "placement.bridge", f"Megatron-Core's bridges need cp 1, {LANGUAGE} has cp {language.cp}: {instead}"
        )
    if local and apart:
        # mimo/config/role.py:76-89
        yield Fault(
            "placement.bridge",
            f"Megatron-Core's model has all encoders on the ranks of {LANGUAGE} or none; {', '.join(local)} shares "
            f"them and {', '.join(apart)} does not: {instead}",
        )
    if local and language.pp > 1:
        yield Fault(
            "placement.bridge",
            f"Megatron-Core's bridge between modules on the same ranks needs pp 1, {LANGUAGE} has pp {language.pp}: "
            f"{instead}",
        )
    for edge in layout.edges:
        given, taken = layout.modules[edge.giver].dp, layout.modules[edge.taker].dp
        if max(given, taken) % min(given, taken):
            yield Fault(
                "placement.bridge",
                f"Megatron-Core's bridges need data-parallel sizes that divide each other, {edge.giver} has dp {given} "
                f"and {edge.taker} dp {taken}: {instead}",
            )
    for name, module in cfg.encoders.items():
        if module.layout.pp > 1:
            # mimo/submodules/base.py, ModalitySubmodules.forward: later stages pass on what they receive
            yield Fault(
                "placement.bridge",
                f"Megatron-Core's model has encoders of one stage, {name} has pp {module.layout.pp}: {instead}",
            )
        if module.balance != "samples":
            yield Fault(
                f"modules.{name}.balance",
                f"is {module.balance}: Megatron-Core's bridges take as many samples from each rank: {instead}",
            )
