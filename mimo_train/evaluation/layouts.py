"""The layout on which a trained model is opened: one process, replicas, the layout of its run, or another one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from encoders.key_rules import nearest
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.read_values import structured
from mimo_train.config.run_files import content_of, shipped_configs
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.config.schema_run import PlacementConfig

OF_RUN = "run"
"""Layout that the run was trained on."""


def with_layout(cfg: ConfigContainer, layout: str = "", processes: int = 1) -> ConfigContainer:
    """Return the config at another layout, which is not checked yet.

    Args:
        layout: `run`; a file or a name of the layout group; or sizes of the language model such as `tp=2,dp=2`, which
            encoders share unless they have sizes too, such as `images.dp=4`. Empty: every module on the same ranks,
            with `processes` replicas.

    Raises:
        UserError: there is no such file, or a size is no number.
        ConfigError: it has unknown keys or modules.
    """
    if layout == OF_RUN:
        return cfg
    if layout and "=" not in layout:
        content = content_of(_file(layout))
        sizes = {name: (module or {}).get("layout") or {} for name, module in (content.get("modules") or {}).items()}
        placement = content.get("placement") or {}
        if missing := [name for name in cfg.encoders if name not in sizes]:
            raise ConfigError([Fault(f"modules.{name}.layout", f"missing in --layout {layout}") for name in missing])
        return _placed(cfg, sizes, placement)
    sizes = _sizes(layout) if layout else {LANGUAGE: {"dp": processes}}
    language = {"tp": 1, "dp": 1, "cp": 1, **sizes.get(LANGUAGE, {})}
    same = {"tp": language["tp"], "dp": language["dp"] * language["cp"]}
    return _placed(cfg, dict.fromkeys(cfg.encoders, same) | sizes, {"mode": "shared"})


def _placed(cfg: ConfigContainer, sizes: Mapping[str, Any], placement: Mapping[str, Any]) -> ConfigContainer:
    placed, faults = structured(PlacementConfig, placement, "placement")
    layouts = {name: LayoutConfig() for name in cfg.modules}
    for name, values in sizes.items():
        layouts[name], wrong = structured(LayoutConfig, values, f"modules.{name}.layout")
        faults += wrong
        if name not in cfg.modules:
            text = f"--layout names it, but the modules of this model are {', '.join(cfg.modules)}"
            faults.append(Fault(f"modules.{name}", text))
    if faults:
        raise ConfigError(faults)
    modules = {name: replace(module, layout=layouts[name]) for name, module in cfg.modules.items()}
    return replace(cfg, modules=modules, placement=placed)


def _file(layout: str) -> Path:
    group = shipped_configs() / "layout"
    path = Path(layout) if layout.endswith((".yaml", ".yml")) else group / f"{layout}.yaml"
    if not path.is_file():
        near = nearest(layout, sorted(file.stem for file in group.glob("*.yaml")))
        raise UserError(f"--layout: no file {path}. {near}, or give run, a YAML file, or sizes such as tp=2")
    return path


def _sizes(layout: str) -> dict[str, dict[str, Any]]:
    sizes: dict[str, dict[str, Any]] = {}
    for item in layout.split(","):
        key, _, value = item.strip().partition("=")
        module, _, name = key.rpartition(".")
        if not value.isdecimal() or not int(value):
            raise UserError(f"--layout: expected NAME=NUMBER, such as tp=2 or images.dp=4, got {item!r}")
        sizes.setdefault(module or LANGUAGE, {})[name] = int(value)
    return sizes
