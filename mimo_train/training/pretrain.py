"""Entry points: `pretrain` and `finetune` drive the same loop."""

from mimo_train.check.faults import config_faults
from mimo_train.config import ConfigContainer, ConfigError, Fault
from mimo_train.layout import RunLayout, plan
from mimo_train.metrics import progress as progress_log
from mimo_train.training import gpt_step, mimo_step
from mimo_train.training.exit import ExitSignal
from mimo_train.training.forward_step import ForwardStepCallable, needs_global_state_injection
from mimo_train.training.setup import SetupOutput, setup
from mimo_train.training.train import train


def default_forward_step(cfg: ConfigContainer) -> ForwardStepCallable:
    """`mimo_step.forward_step` for several modules, `gpt_step.forward_step` for a plain GPT."""
    return mimo_step.forward_step if cfg.encoders else gpt_step.forward_step


def pretrain(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable | None = None,
    exit_signal: ExitSignal | None = None,
) -> int:
    """Train, evaluate and save as the config says; continue if `run.dir` holds a checkpoint.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`; default: `default_forward_step`.
        exit_signal: notes signals already, for a program that wants them noted from its first moment.

    Returns:
        The exit code.

    Raises:
        ConfigError: values, modules, layout or batch are impossible.
        ValueError: data, tokenizer or checkpoint cannot be used.
        TypeError: the forward step has none of the accepted forms.
    """
    faults = config_faults(config)
    if faults:
        raise ConfigError(faults)
    layout: RunLayout = plan(config)
    forward_step_func = forward_step_func or default_forward_step(config)
    needs_global_state_injection(forward_step_func)
    with exit_signal or ExitSignal() as exit_signal:
        run = setup(config, layout)
        run.state.pipeline.exit_requested = exit_signal.requested
        try:
            return train(
                forward_step_func,
                run.model,
                run.optimizer,
                run.scheduler,
                run.train_data_iterator,
                run.held_out,
                run.state,
                run.checkpointing_context,
            )
        finally:
            close(run)


def finetune(config: ConfigContainer, forward_step_func: ForwardStepCallable | None = None) -> int:
    """Train from the weights of another run: `pretrain` for a config with `checkpoint.weights`.

    A run of its own, with its own data, optimizer and schedule; started again, it continues from its own checkpoints.

    Raises:
        ConfigError: `checkpoint.weights` is empty; and all that `pretrain` raises.
    """
    if not config.checkpoint.weights:
        raise ConfigError([Fault("checkpoint.weights", "is empty: finetune starts from the weights of a checkpoint")])
    return pretrain(config, forward_step_func)


def close(run: SetupOutput) -> None:
    """End threads and writers, also after a failure."""
    run.train_data_iterator.close()
    state = run.state
    if state.metrics is not None:
        state.console.close()
        state.metrics.close()
        if state.train_state.step >= state.cfg.train.iters:
            progress_log.job_exited(state.run_dir, step=state.train_state.step, reason="finished")
