"""What Megatron-Core 0.19.2's own bridges cannot do, told before a run starts. Imports no torch."""

from collections.abc import Collection, Iterator

from mimo_train.config.schema import LANGUAGE, ConfigContainer, Fault

BRIDGES = ("planned", "megatron")
"""How features reach the language model."""


def bridge_faults(cfg: ConfigContainer, apart: Collection[str]) -> Iterator[Fault]:
    """Why `placement.bridge` cannot carry these layouts.

    Args:
        apart: encoders on other ranks than the language model's.
    """
    bridge, language = cfg.placement.bridge, cfg.language.layout
    if bridge not in BRIDGES:
        yield Fault("placement.bridge", f"must be {' or '.join(BRIDGES)}, is {bridge!r}")
    if bridge != "megatron":
        return
    instead = "use placement.bridge=planned"
    local = [name for name in cfg.encoders if name not in apart]
    if language.cp > 1 and cfg.encoders:
        # bridge_communicator.py:105-116, colocated_communicator.py:118-154
        yield Fault(
            "placement.bridge", f"Megatron-Core's bridges need cp 1, {LANGUAGE} has cp {language.cp}: {instead}"
        )
    if local and apart:
        # mimo/config/role.py:76-89
        yield Fault(
            "placement.bridge",
            f"Megatron-Core's model has all encoders on the ranks of {LANGUAGE} or none; {', '.join(local)} stands "
            f"there and {', '.join(apart)} apart: {instead}",
        )
    if local and language.pp > 1:
        yield Fault(
            "placement.bridge",
            f"Megatron-Core's bridge between modules on the same ranks needs pp 1, {LANGUAGE} has pp {language.pp}: "
            f"{instead}",
        )
    for name, module in cfg.encoders.items():
        if module.layout.pp > 1:
            # mimo/submodules/base.py, ModalitySubmodules.forward: later stages pass on what they receive
            yield Fault(
                "placement.bridge",
                f"Megatron-Core's model has encoders of one stage, {name} has pp {module.layout.pp}: {instead}",
            )
        larger, smaller = max(module.layout.dp, language.dp), min(module.layout.dp, language.dp)
        if larger % smaller:
            yield Fault(
                "placement.bridge",
                f"Megatron-Core's bridges need data-parallel sizes that divide each other, {name} has dp "
                f"{module.layout.dp} and {LANGUAGE} dp {language.dp}: {instead}",
            )
        if module.balance != "samples":
            yield Fault(
                f"modules.{name}.balance",
                f"is {module.balance}: Megatron-Core's bridges take as many samples from each rank: {instead}",
            )
