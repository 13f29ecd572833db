"""Prometheus: the newest numbers of a run in run.dir/metrics.prom, which node_exporter's textfile collector reads, and
with a port on an endpoint that is asked for them (OpenMetrics, or Prometheus' text format).

Every number is a gauge `mimo_train_...` with the label `run`. What a key of metrics.jsonl says of a module, a source, a
held-out set or a parameter is in labels, so that one query shows all of them: `learning_rate/images` is
`mimo_train_learning_rate{module="images"}`.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "metrics.prom"
PREFIX = "mimo_train_"

_LABELLED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(?P<name>learning_rate|tflops|mfu|hfu|imbalance(_tokens|_attention)?)(/(?P<module>.+))?", "{name}"),
        (r"time/(?P<module>[^/]+)/(?P<part>[^/]+)", "module_seconds"),
        (r"straggler/(?P<module>[^/]+)/(?P<name>[^/]+)", "straggler_{name}"),
        (r"loss/(?P<source>.+)", "source_loss"),
        (r"(?P<name>samples|epochs)/(?P<source>.+)", "source_{name}"),
        (r"l2_norm/grad/(?P<parameter>.+)", "grad_l2_norm"),
        (r"eval/((?P<set>.+)/)?(?P<name>[^/]+)", "eval_{name}"),
    )
]
"""Keys with names of the config in them, and what they are called without; groups but `name` are labels."""


class PrometheusSink:
    """The newest value of every key."""

    def __init__(self, run_dir: Path, port: int):
        """Write into the run's folder, and answer at `port` unless it is 0.

        Raises:
            OSError: the port is in use.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        self.handle = CollectorRegistry()
        self._newest = _Newest(run_dir.resolve().name)
        self._file = run_dir / FILE
        self.handle.register(self._newest)
        self._server: Any = None
        if port:
            self._server, self._thread = start_http_server(port, registry=self.handle)

    def log(self, step: int, consumed_samples: int, values: dict[str, float]) -> None:
        """Replace the values of these keys, and the file."""
        from prometheus_client import write_to_textfile

        own = {"step": step, "consumed_samples": consumed_samples, "logged_timestamp_seconds": time.time()}
        # In place of the old one: the endpoint's thread may be reading.
        self._newest.values = self._newest.values | own | values
        write_to_textfile(str(self._file), self.handle)

    def close(self) -> None:
        """End the endpoint; the file stays, with the last values."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)


class _Newest:
    """Collects values by key as gauges."""

    def __init__(self, run: str):
        self.values: dict[str, float] = {}
        self._run = run

    def collect(self) -> Iterator[Any]:
        """One family for each name, with the labels that any of its values has."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, list[tuple[dict[str, str], float]]] = {}
        for key, value in self.values.items():
            name, labels = gauge_of(key)
            families.setdefault(name, []).append((labels, value))
        for name, found in families.items():
            names = sorted({label for labels, _ in found for label in labels})
            family = GaugeMetricFamily(name, "See docs/metrics.md.", labels=["run", *names])
            for labels, value in found:
                family.add_metric([self._run, *(labels.get(label, "") for label in names)], float(value))
            yield family


def gauge_of(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of the gauge for a key of metrics.jsonl."""
    for pattern, name in _LABELLED:
        if found := pattern.fullmatch(key):
            labels = {label: text for label, text in found.groupdict().items() if text and label != "name"}
            return _name(name.format(**found.groupdict())), labels
    return _name(key), {}


def _name(text: str) -> str:
    return PREFIX + re.sub(r"\W", "_", text, flags=re.ASCII)
