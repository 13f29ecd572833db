"""What a rank of a CPU run imports, for the launcher that forks its ranks (`mimo_train.launch.forked`)."""

import importlib

from mimo_train.launch.library_log import adopt_torch
from mimo_train.parallel.light_imports import light_imports

adopt_torch()  # before what is imported next speaks to torch's loggers
with light_imports("cpu"):
    importlib.import_module("mimo_train.training.pretrain")
