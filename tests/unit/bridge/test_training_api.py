"""The training API of Megatron-Bridge: names and signatures as documented, and the table of docs/training-api.md."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "training-api.md"
UTILS = "utils.train_utils"

SIGNATURES = {
    "pretrain": """
        pretrain(config, forward_step_func)
        _pretrain(state, forward_step_func, store=None, inprocess_call_wrapper=None)
    """,
    "finetune": "finetune(config, forward_step_func)",
    "train": """
        train(forward_step_func, model, optimizer, scheduler, train_data_iterator, valid_data_iterator, global_state, \
            checkpointing_context, process_non_loss_data_func=None, non_loss_data_func=None)
        train_step(forward_step_func, data_iterator, model, optimizer, scheduler, global_state)
        post_training_step_callbacks(model, num_floating_point_operations_since_last_log_event, straggler_timer, \
            iteration, prof, config, should_toggle_forward_pre_hook, nsys_nvtx_context=None)
        should_disable_forward_pre_hook(use_megatron_fsdp, use_distributed_optimizer, overlap_param_gather)
        enable_forward_pre_hook(model)
        disable_forward_pre_hook(model, param_sync=True)
        get_start_time_from_progress_log(cfg)
        compute_throughputs_and_append_to_progress_log(state, num_floating_point_operations_so_far)
        save_checkpoint_and_time(state, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, \
            checkpointing_context, non_persistent_ckpt=False, train_data_iterator=None)
        checkpoint_and_decide_exit(state, model, optimizer, opt_param_scheduler, \
            num_floating_point_operations_so_far, checkpointing_context, train_data_iterator)
        _finish_train(global_state)
        _handle_mxfp8_param_buffer_copy(optimizer, reuse_grad_buf_for_mxfp8_param_ag, overlap_param_gather)
    """,
    "gpt_step": "forward_step(state, data_iterator, model, return_schedule_plan=False)",
    "mimo_step": """
        loss_func(loss_mask, output_tensor)
        get_batch(data_iterator)
        forward_step(state, data_iterator, model)
    """,
    UTILS: """
        LinearForLastLayer(input_size, output_size, sequence_parallel)
        LinearForLastLayer.forward(self, input_, weight=None, runtime_gather_output=None)
        create_value_head_hook(hidden_size, sequence_parallel, output_size=1)
        make_value_model(hidden_size, sequence_parallel)
        freeze_moe_router(model)
        _ensure_model_list(model)
        _freeze_parameter_if_present(module, name)
        _register_linear_for_last_layer_mapping()
        start_memory_history_recording(profiling)
        param_is_not_shared(param)
        calc_params_l2_norm(model, model_config, use_megatron_fsdp=False, force_create_fp32_copy=False)
        calc_dtensor_params_l2_norm(params)
        reduce_max_stat_across_model_parallel_group(stat, mp_group)
        logical_and_across_model_parallel_group(input, mp_group)
        reduce_max_memory_across_pp_group(memory_report, pp_group)
        _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)
        _MoeMetricFanoutWriter._sanitize(value)
        _MoeMetricFanoutWriter.add_scalar(self, name, value, iteration)
        _build_moe_metric_writer(tb_writer, comet_logger, mlflow_logger)
        training_log(loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, loss_scale, \
            report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, config, global_state, \
            history_wct, model, pg_collection=None, log_max_attention_logit=None, loaded_iteration=0, seq_length=None)
        report_memory(memory_keys)
        report_l2_norm_grad(model)
        report_runtime(train_state, start_time, seq_length, train_iters, time_unit='seconds')
        report_throughput(train_config, iteration, seq_length, history_wct, window_size)
        prepare_forward_step_func(forward_step_func, state)
        needs_global_state_injection(forward_step_func)
        maybe_inject_state(forward_step_func, state, needs_injection=None)
    """,
}
"""Documented signatures by module of `bridge.training`. All parameters may be given by position or by name."""

OTHER_NAMES = {
    "state": ("GlobalState", "TrainState"),
    "config": ("ConfigContainer", "ProfilingConfig", "TrainingConfig"),
    "forward_step_func_types": ("ForwardStepCallable",),
    "losses": ("masked_token_loss",),
    "profiling": ("TNvtxContext",),
    "mimo_step": ("logger",),
    UTILS: ("logger", "ModelList", "ModelHook", "MEMORY_KEYS"),
}
"""Documented names without a signature."""


def documented(module: str, path: str):
    """The object that `mimo_train.bridge.training.MODULE` has under a documented name."""
    value = importlib.import_module(f"mimo_train.bridge.training.{module}")
    for name in path.split("."):
        value = getattr(value, name)
    return value


def signatures() -> list[tuple[str, str, list[tuple[str, object]]]]:
    """(module, name, [(parameter, default)]) of every documented function and class."""
    parsed = []
    for module, text in SIGNATURES.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            path, _, parameters = line.partition("(")
            (function,) = ast.parse(f"def function({parameters}: pass").body
            arguments, defaults = function.args.args, [ast.literal_eval(default) for default in function.args.defaults]
            defaults = [inspect.Parameter.empty] * (len(arguments) - len(defaults)) + defaults
            names = [argument.arg for argument in arguments]
            parsed.append((module, path, [*zip(names, defaults, strict=True)]))
    return parsed


@pytest.mark.parametrize(("module", "path", "parameters"), signatures(), ids=[each[1] for each in signatures()])
def test_the_signature_is_the_documented_one(module, path, parameters):
    """What is added to it can only be given by name, and need not be given."""
    actual = [*inspect.signature(documented(module, path)).parameters.values()]
    by_position, added = actual[: len(parameters)], actual[len(parameters) :]
    assert [parameter.name for parameter in by_position] == [name for name, _ in parameters]
    for parameter, (name, default) in zip(by_position, parameters, strict=True):
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name
        # `forward_step_func` may be left out, where it is documented without a default.
        assert parameter.default == default or name == "forward_step_func", name
    for parameter in added:
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty, parameter.name


def test_every_other_documented_name_is_there():
    for module, names in OTHER_NAMES.items():
        for name in names:
            assert documented(module, name) is not None


def test_every_public_function_is_on_the_page():
    table = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {f"{module}.{name}" for module, names in table for name in re.findall(r"`(\w+)`", names)}
    public = {f"{module}.{path}" for module, path, _ in signatures() if "." not in path and not path.startswith("_")}
    assert public <= listed
