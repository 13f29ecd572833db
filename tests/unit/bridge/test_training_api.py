"""The training API of Megatron-Bridge: names and signatures as documented, the table of docs/training-api.md, and the
test of what each name does."""

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


PROOFS = {
    "tests/dist/test_layout_parity.py::test_layout_gives_the_numbers_of_one_process": [
        "pretrain.pretrain",
        "gpt_step.forward_step",
    ],
    "tests/dist/training/test_inprocess.py::test_a_failed_run_goes_on_in_its_processes_to_the_same_numbers": [
        "pretrain._pretrain"
    ],
    "tests/dist/training/test_training.py::test_finetune_starts_from_the_weights_of_another_run_on_other_data": [
        "finetune.finetune"
    ],
    "tests/unit/training/step/test_forward_step.py::test_forms_with_state_receive_the_state_itself": [
        "utils.train_utils.prepare_forward_step_func"
    ],
    "tests/unit/training/step/test_forward_step.py::test_other_signatures_get_the_state_only_by_its_name": [
        "utils.train_utils.needs_global_state_injection"
    ],
    "tests/unit/training/step/test_forward_step.py::test_known_answer_is_not_asked_again": [
        "utils.train_utils.maybe_inject_state"
    ],
    "tests/unit/training/step/test_losses.py::test_only_the_last_stage_of_the_language_model_has_a_loss": [
        "mimo_step.forward_step"
    ],
    "tests/unit/training/step/test_losses.py::test_a_microbatch_holds_what_the_model_takes_and_nothing_else": [
        "mimo_step.get_batch"
    ],
    "tests/unit/training/step/test_losses.py::test_the_loss_is_a_sum_with_its_number_of_tokens": [
        "mimo_step.loss_func"
    ],
    "tests/dist/training/step/test_losses.py::test_token_losses_of_uneven_ranks_are_those_of_one_process": [
        "losses.masked_token_loss"
    ],
    "tests/unit/training/step/test_forward_step.py::test_later_changes_of_the_state_are_seen": ["state.GlobalState"],
    "tests/dist/training/test_no_hidden_sync.py::test_a_logging_interval_costs_one_message_and_one_copy": [
        "train.train"
    ],
    "tests/dist/training/test_training.py::test_frozen_parts_do_not_move_and_the_others_do": ["train.train_step"],
    "tests/dist/debug/test_profiling.py::test_the_chosen_steps_of_the_chosen_rank_are_recorded": [
        "train.post_training_step_callbacks"
    ],
    "tests/unit/optim/test_optim.py::test_hooks_are_off_while_saving_where_parameters_may_be_on_their_way": [
        "train.should_disable_forward_pre_hook"
    ],
    "tests/unit/optim/test_optim.py::test_hooks_are_switched_where_there_are_any": ["train.enable_forward_pre_hook"],
    "tests/dist/checkpoint/test_checkpointing.py::test_parameters_still_on_their_way_are_saved_whole": [
        "train.disable_forward_pre_hook"
    ],
    "tests/unit/optim/test_optim.py::"
    "test_main_parameters_are_copied_where_the_buffer_is_shared_and_gathering_overlaps": [
        "train._handle_mxfp8_param_buffer_copy"
    ],
    "tests/dist/checkpoint/test_checkpointing.py::test_both_kinds_are_saved_at_their_intervals_and_never_twice": [
        "train.save_checkpoint_and_time"
    ],
    "tests/e2e/test_exit_paths.py::test_a_run_ends_for_every_reason_in_turn_and_goes_on": [
        "train.checkpoint_and_decide_exit"
    ],
    "tests/dist/debug/test_profiling.py::test_a_run_that_ends_early_leaves_what_it_has_and_goes_on_recording": [
        "train._finish_train"
    ],
    "tests/unit/logging/test_progress.py::test_start_of_the_jobs_with_as_many_processes": [
        "train.get_start_time_from_progress_log"
    ],
    "tests/unit/logging/test_progress.py::test_throughputs_of_the_job_and_of_all_jobs": [
        "train.compute_throughputs_and_append_to_progress_log"
    ],
    "tests/dist/logging/test_training_log.py::test_an_interval_is_the_mean_of_its_steps_at_any_layout": [
        "utils.train_utils.training_log"
    ],
    "tests/unit/logging/test_runtime.py::test_the_keys_are_those_that_torch_counts": ["utils.train_utils.MEMORY_KEYS"],
    "tests/unit/logging/test_runtime.py::test_every_statistic_of_the_allocator_in_gigabytes": [
        "utils.train_utils.report_memory"
    ],
    "tests/dist/logging/test_norms.py::test_ranks_agree_on_a_maximum_a_conjunction_and_memory": [
        "utils.train_utils.reduce_max_memory_across_pp_group",
        "utils.train_utils.reduce_max_stat_across_model_parallel_group",
        "utils.train_utils.logical_and_across_model_parallel_group",
    ],
    "tests/unit/logging/test_runtime.py::test_history_is_recorded_where_a_snapshot_is_wanted": [
        "utils.train_utils.start_memory_history_recording"
    ],
    "tests/dist/logging/test_norms.py::test_gpt_norms_are_those_of_one_process": [
        "utils.train_utils.report_l2_norm_grad",
        "utils.train_utils.param_is_not_shared",
    ],
    "tests/dist/logging/test_norms.py::test_vlm_norms_are_those_of_one_process": [
        "utils.train_utils.calc_params_l2_norm"
    ],
    "tests/dist/logging/test_norms.py::test_norms_of_dtensors": ["utils.train_utils.calc_dtensor_params_l2_norm"],
    "tests/unit/logging/test_runtime.py::test_runtime_in_every_unit": ["utils.train_utils.report_runtime"],
    "tests/unit/logging/test_runtime.py::test_throughput_over_the_window": ["utils.train_utils.report_throughput"],
    "tests/unit/logging/test_moe.py::test_one_value_reaches_everybody": ["utils.train_utils._MoeMetricFanoutWriter"],
    "tests/dist/logging/test_norms.py::test_metrics_that_megatron_core_writes_reach_every_tracker": [
        "utils.train_utils._build_moe_metric_writer"
    ],
    "tests/unit/models/test_heads.py::test_a_head_is_called_like_an_output_layer": [
        "utils.train_utils.LinearForLastLayer"
    ],
    "tests/unit/models/test_heads.py::test_the_hook_replaces_the_output_layer_of_the_last_stage_only": [
        "utils.train_utils.create_value_head_hook"
    ],
    "tests/dist/models/test_heads.py::test_a_value_model_trains_to_the_numbers_of_one_process": [
        "utils.train_utils.make_value_model"
    ],
    "tests/dist/models/test_heads.py::test_frozen_routers_do_not_move_and_experts_do": [
        "utils.train_utils.freeze_moe_router"
    ],
    "tests/unit/models/test_heads.py::test_a_model_becomes_a_list_of_chunks": ["utils.train_utils._ensure_model_list"],
    "tests/unit/models/test_heads.py::test_only_parameters_that_are_there_are_frozen": [
        "utils.train_utils._freeze_parameter_if_present"
    ],
    "tests/unit/models/test_heads.py::test_checkpoints_are_told_how_the_head_is_stored": [
        "utils.train_utils._register_linear_for_last_layer_mapping"
    ],
}
"""Tests of what the names of `bridge.training` do: names by test."""


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


def test_the_test_of_a_name_exists():
    for test in PROOFS:
        file, _, function = test.partition("::")
        nodes = ast.parse((ROOT / file).read_text()).body
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{file} has no {function}"


def test_every_documented_function_has_a_test_and_is_on_the_page():
    names = {f"{module}.{path}" for module, path, _ in signatures() if "." not in path}
    proven = {name for tested in PROOFS.values() for name in tested}
    assert names <= proven
    table = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {f"{module}.{name}" for module, names in table for name in re.findall(r"`(\w+)`", names)}
    assert proven <= listed
    for name in proven:
        assert documented(*name.rsplit(".", 1)) is not None, name
