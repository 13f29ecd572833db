import logging

from mimo_train.bridge.training.utils.train_utils import _MoeMetricFanoutWriter
from mimo_train.logging.sinks.trackers import MlflowHandle


class Tracker:
    """Takes what Comet and MLflow take, and only numbers."""

    def __init__(self):
        self.taken = []

    def log_metrics(self, values, step):
        for name, value in values.items():
            self.log_metric("comet", name, value, step)

    def log_metric(self, run_id, name, value, step):
        assert type(value) is float
        self.taken.append((run_id, name, value, step))


class Broken:
    def log_metrics(self, values, step):
        raise ConnectionError("no network")


def test_a_tracker_that_fails_is_named_once_and_left_alone(caplog):
    client = Tracker()
    fanout = _MoeMetricFanoutWriter(None, Broken(), MlflowHandle(client, "run"))
    with caplog.at_level(logging.WARNING):
        fanout.add_scalar("z_loss", 1.0, 1)
        fanout.add_scalar("z_loss", 2.0, 2)
    (record,) = caplog.records
    assert "comet: z_loss of step 1 could not be written (ConnectionError: no network)" in record.getMessage()
    assert [value for _, _, value, _ in client.taken] == [1.0, 2.0]
