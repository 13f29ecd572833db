"""The layouts of `launch.layouts`, each as the launcher would start it. Imports no torch."""

from collections.abc import Sequence

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.launch.start import launch_of, processes_per_node
from mimo_train.layout.ranks import lay_out
from mimo_train.preflight.check.findings import Report, Table


def add_layouts(
    report: Report, config: str, overrides: Sequence[str], cfg: ConfigContainer, *, without_data: bool
) -> None:
    """A table of the layouts by their nodes, with the faults of each.

    Args:
        config, overrides: that `cfg` was loaded from.
    """
    if any(fault.key.startswith("launch.") for fault in report.faults):
        return
    rows, known = [], [*report.faults]
    for nodes in sorted(cfg.launch.layouts):
        key = f"launch.layouts.{nodes}"
        try:
            changed = launch_of(config, overrides, nodes, {}, without_data=without_data).cfg
            per_node = processes_per_node(changed, nodes, without_data=without_data)
        except ConfigError as error:
            own = [fault for fault in error.faults if fault not in known]  # and not those of every layout
            report.faults += [fault if fault.key == key else Fault(key, str(fault)) for fault in own]
        except UserError as error:
            report.faults.append(Fault(key, str(error)))
        else:
            modules = ", ".join(f"{name} ({sizes})" for name, sizes in lay_out(changed).modules.items())
            rows.append((str(nodes), str(per_node), str(changed.train.micro_batch_size), modules))
    if rows:
        report.tables.append(Table("layouts by nodes", ("nodes", "processes each", "micro batch", "modules"), rows))
