"""Layouts at which text is generated."""

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.layout.ranks import RunLayout


def require_decodable(layout: RunLayout) -> None:
    """Raise ConfigError unless each replica of the language model can decode alone: one stage and whole sequences, with
    all modules on its ranks."""
    language = layout.language
    for name, module in layout.modules.items():
        sizes = {"pp": module.pp, "cp": module.cp, "ep": module.ep}
        if wide := next((axis for axis, size in sizes.items() if size > 1), None):
            text = (
                f"is {sizes[wide]}, and text is generated with pp=1 cp=1 ep=1. Generate with another layout of the "
                "checkpoint, which any layout can load"
            )
            raise ConfigError([Fault(f"modules.{name}.layout.{wide}", text)])
    for name, module in layout.modules.items():
        if module.ranks != language.ranks:
            text = (
                f"modules.{name} is on ranks {module.ranks[0]} to {module.ranks[-1]}, and the language model on "
                f"{language.ranks[0]} to {language.ranks[-1]}; text is generated with all modules on the same ranks. "
                "Set placement.mode=shared with layouts of one size"
            )
            raise ConfigError([Fault("placement", text)])
        if language.tp % module.tp:
            text = (
                f"is {module.tp}, and text is generated where it divides that of the language model ({language.tp}). "
                "Generate with another layout"
            )
            raise ConfigError([Fault(f"modules.{name}.layout.tp", text)])
