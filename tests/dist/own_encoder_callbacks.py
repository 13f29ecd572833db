"""What a test looks at when a run begins."""

from mimo_train.models.parameters import global_names, modules_of
from mimo_train.training.callbacks import Callback


class FirstWeight(Callback):
    """Keeps the first four numbers of a parameter of the encoder `images`."""

    def __init__(self, name: str):
        self._name = name
        self.values: list[float] = []

    def on_train_start(self, state, model):
        (module,) = modules_of(model)["images"]
        self.values = global_names(module)[self._name].detach().flatten()[:4].tolist()
