"""Imported once, by the server from which jobs are forked."""

import contextlib
import gc
import importlib
import warnings

warnings.simplefilter("ignore")
for name in ("torch", "mimo_train.training.pretrain"):
    with contextlib.suppress(Exception):  # a job that needs it imports it again, and reports the error
        importlib.import_module(name)
gc.freeze()
