"""Which charts a run has: loss, exact match, gradient norm, learning rates, throughput."""

from mimo_train.layout.ranks import RunLayout
from mimo_train.logging.report.charts import Chart, Series, chart
from mimo_train.logging.report.curves import Column, smooth
from mimo_train.logging.report.headline import held_out_keys, set_of
from mimo_train.logging.report.layout_drawing import module_colors

_RATE = "learning_rate/"
COLORS = 6
_LOSS_COLOR, _HELD_OUT_COLOR, _MATCH_COLOR, _NORM_COLOR, _SPEED_COLOR = 0, 3, 2, 4, 5


def run_charts(data: dict[str, Column], layout: RunLayout) -> list[Chart]:
    """The charts for which there are values, the most important first."""
    if "consumed_samples" not in data:
        return []
    last_step = data["consumed_samples"].steps[-1]
    charts = [
        chart("Loss", "cross-entropy, nats per token", _loss_series(data), last_step=last_step),
        chart("Loss by source", "smoothed", _source_series(data), last_step=last_step, name_single=True),
        chart(
            "Held-out exact match",
            "answers equal to the truth",
            _match_series(data),
            last_step=last_step,
            y_range=(0, 1),
            y_format=lambda value: f"{value:.0%}" if value in (0, 1) else f"{100 * value:.3g}%",
        ),
        chart(
            "Gradient norm",
            "over all modules, before clipping",
            _raw_and_smooth(data.get("grad_norm"), "", _NORM_COLOR),
            last_step=last_step,
        ),
        chart("Learning rate", "per module", _rate_series(data, layout), last_step=last_step, name_single=True),
        chart(
            "Throughput",
            "tokens per second",
            _raw_and_smooth(data.get("tokens_per_second"), "", _SPEED_COLOR),
            last_step=last_step,
        ),
    ]
    return [one for one in charts if one is not None]


def _loss_series(data: dict[str, Column]) -> list[Series]:
    series = _raw_and_smooth(data.get("lm loss"), "training, ", _LOSS_COLOR)
    for number, key in enumerate(held_out_keys(data, "loss")):
        name = ", ".join(filter(None, ("held-out", set_of(key))))
        color = (_HELD_OUT_COLOR + number) % COLORS
        series.append(Series(name, data[key].steps, data[key].values, "dots", color))
    return series


def _match_series(data: dict[str, Column]) -> list[Series]:
    """Exact match of every held-out set."""
    return [
        Series(
            set_of(key) or "exact match", data[key].steps, data[key].values, "dots", (_MATCH_COLOR + number) % COLORS
        )
        for number, key in enumerate(held_out_keys(data, "exact_match"))
    ]


def _source_series(data: dict[str, Column]) -> list[Series]:
    """The losses of the sources of a mixture, smoothed."""
    found = [(key.removeprefix("loss/"), column) for key, column in data.items() if key.startswith("loss/")]
    return [
        Series(name, column.steps, smooth(column.values, len(column.values) / 50), "line", number % COLORS)
        for number, (name, column) in enumerate(found)
    ]


def _raw_and_smooth(column: Column | None, prefix: str, color: int) -> list[Series]:
    if column is None:
        return []
    smoothed = smooth(column.values, len(column.values) / 50)
    return [
        Series(f"{prefix}each step", column.steps, column.values, "raw", color),
        Series(f"{prefix}smoothed", column.steps, smoothed, "line", color),
    ]


def _rate_series(data: dict[str, Column], layout: RunLayout) -> list[Series]:
    """One curve for each module; modules with equal rates share one, or they would hide each other."""
    colors = module_colors(layout)
    groups: list[tuple[list[str], Column]] = []
    for key, column in data.items():
        if not key.startswith(_RATE):
            continue
        name = key.removeprefix(_RATE)
        same = next((names for names, other in groups if other == column), None)
        if same is None:
            groups.append(([name], column))
        else:
            same.append(name)
    return [
        Series(", ".join(names), column.steps, column.values, "line", colors.get(names[-1], 0))
        for names, column in groups
    ]
