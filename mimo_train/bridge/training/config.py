"""Config sections, at Megatron-Bridge's path and with its names."""

from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_checkpoint import CheckpointConfig
from mimo_train.config.schema_log import LogConfig as LoggerConfig
from mimo_train.config.schema_log import ProfilingConfig
from mimo_train.config.schema_train import TrainConfig as TrainingConfig

__all__ = ["CheckpointConfig", "ConfigContainer", "LoggerConfig", "ProfilingConfig", "TrainingConfig"]
