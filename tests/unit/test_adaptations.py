"""Megatron-Core as it was when each adaptation was written: a test here fails where its reason may be gone.

What an adaptation does has tests of its own (docs/architecture.md). These look at the source that made it necessary,
for reasons that cannot be run in one process. After an upgrade: read the place, then remove the adaptation or the row.
"""

import inspect
import re
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from pkgutil import resolve_name

import pytest
from omegaconf import OmegaConf

CORE = "megatron.core."
ROOT = Path(__file__).resolve().parents[2]
REASONS = [
    # adaptation, place in Megatron-Core, what is written there
    ("parallel/device.py", "timers", "try: import wandb except ImportError: wandb = None"),
    (
        "parallel/device.py",
        "timers",
        "try: from torch.utils.tensorboard import SummaryWriter except ImportError",
    ),
    ("parallel/device.py", "jit", "jit_fuser = torch.compile"),
    ("parallel/groups.py", "utils:get_tensor_model_parallel_group_if_none", "parallel_state.get_tensor_model_parallel"),
    (
        "parallel/bridge/communicator.py",
        "pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        "if config.variable_seq_lengths or config.mtp_standalone: recv_prev_shape, recv_next_shape = "
        "self._communicate_shapes(",
    ),
    (
        "parallel/bridge/communicator.py",
        "pipeline_parallel.multimodule_communicator:MultiModulePipelineCommunicator.current_stage.fget",
        "- 1 ) # Convert from 1-indexed to 0-indexed",
    ),
    (
        "parallel/bridge/interleaved.py",
        "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        "pipeline_parallel_size = p2p_communicator.pp_group.size()",
    ),
    (
        "models/mimo.py",
        "models.mimo.model.base:MimoModel.forward",
        "if self.role.mode == ModuleLayout.NON_COLOCATED: if self.role.has_modality_modules: return "
        "self._forward_encoders(",
    ),
    (
        "models/encoder_module.py",
        "models.mimo.submodules.base:ModalitySubmodules.forward",
        "if hidden_states is not None: combined = hidden_states",
    ),
    (
        "cpu/grad_accumulation.py",
        "distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
        "param.main_grad.add_(param.grad.data) param.grad = None",
    ),
    (
        "models/fusions.py",
        "distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
        "assert ( param.grad is not None ), 'param.grad being None is not safe when overlap_grad_reduce is True'",
    ),
    (
        "parallel/grad_reduction.py",
        "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "if self.per_param_grad_ready_counts == self.golden_per_param_grad_ready_counts: assert "
        "len(self.per_param_grad_ready_counts) == len(self.params) self.start_grad_sync(",
    ),
    (
        "parallel/grad_reduction.py",
        "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        "if self.is_first_batch: self.start_grad_sync(force_all_reduce=force_all_reduce)",
    ),
    (
        "models/attention.py",
        "transformer.dot_product_attention:DotProductAttention.forward",
        "matmul_result = torch.baddbmm(",
    ),
    (
        "models/documents.py",
        "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        "seqlens = ((cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size).tolist()",
    ),
    (
        "models/documents.py",
        "models.mimo.model.base:MimoModel._build_packed_seq_params",
        "packed_seq_params.qkv_format = 'thd'",
    ),
    (
        "models/fusions.py",
        "models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        "if config.mrope_section is not None and freqs.shape[1] > 1:",
    ),
    (
        "models/layers.py",
        "transformer.transformer_layer:TransformerLayer._forward_mlp",
        "pre_mlp_layernorm_output, residual = pre_mlp_layernorm_output",
    ),
    (
        "models/blocks/experts/module.py",
        "transformer.mlp:MLP.forward",
        "output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)",
    ),
    (
        "models/blocks/attention/module.py",
        "distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)',
    ),
    (
        "models/blocks/attention/module.py",
        "models.common.embeddings.yarn_rotary_pos_embedding:_yarn_get_concentration_factor_from_config",
        "yarn_mscale",
    ),
    (
        "models/rotary.py",
        "models.common.embeddings.rotary_pos_embedding:MultimodalRotaryEmbedding.forward",
        "emb = torch.cat([m[i % 3] for i, m in enumerate(emb.split(mrope_section, dim=-1))], dim=-1)",
    ),
    (
        "models/blocks/attention/module.py",
        "transformer.attention:Attention.__init__",
        "init_method=not_none(self.config.output_layer_init_method), bias=self.config.add_bias_linear,",
    ),
    (
        "models/attention.py",
        "transformer.attention:Attention._adjust_key_value_for_inference",
        "attn_mask_type = AttnMaskType.no_mask",
    ),
    (
        "evaluation/generation/decoder.py",
        "models.mimo.model.base:MimoModel._forward_language_module",
        "decoder_input=combined_embeddings, labels=labels, attention_mask=attention_mask, "
        "packed_seq_params=packed_seq_params, )",
    ),
    (
        "models/parameters.py",
        "tensor_parallel.layers:_initialize_affine_weight_cpu",
        "master_weight = torch.empty(output_size, input_size, dtype=torch.float, requires_grad=False) "
        "init_method(master_weight)",
    ),
    (
        "models/parameters.py",
        "extensions.transformer_engine:condition_init_method",
        "return init_method if config.perform_initialization else (lambda w: None)",
    ),
    (
        "models/blocks/experts/module.py",
        "distributed.finalize_model_grads:_update_router_expert_bias",
        "and module.training and not getattr(module, 'frozen_expert_bias', False)",
    ),
    (
        "models/blocks/latent/module.py",
        "transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
        "if packed_seq_params is not None: # If sequence packing, TE expect [t, h, d] shaped qkv input.",
    ),
    (
        "models/blocks/delta/module.py",
        "ssm.gated_delta_net.common:_GDNBase.__init__",
        "if not HAVE_FLA: raise ImportError(",
    ),
    (
        "models/blocks/delta/module.py",
        "ssm.gated_delta_net.gdn:GatedDeltaNet.forward",
        'raise NotImplementedError("GDN does not support inference for now.")',
    ),
    (
        "models/blocks/delta/module.py",
        "ssm.gated_delta_net.common:_GDNBase.reset_parameters",
        ").uniform_(*self.A_init_range)",
    ),
    (
        "models/blocks/experts/module.py",
        "tensor_parallel.layers:ColumnParallelLinear.__init__",
        "self.expert_parallel or self.config.expert_tensor_parallel_size != self.config.tensor_model_parallel_size",
    ),
    (
        "optim/factory.py",
        "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "*shard_fp32_params_this_group, *shard_fp32_from_float16_params_this_group,",
    ),
    (
        "models/router_losses.py",
        "transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
        "activation, aux_loss * num_local_tokens * self.tp_cp_group.size()",
    ),
    (
        "models/freeze.py",
        "tensor_parallel.random:CheckpointFunction.backward",
        "detached_inputs = detach_variable(inputs) with torch.enable_grad(): outputs = ctx.run_function(",
    ),
    (
        "models/freeze.py",
        "tensor_parallel.layers:LinearWithFrozenWeight.backward",
        "return grad_input, None, None, None, None",
    ),
    (
        "models/build.py",
        "transformer.module:MegatronModule.sharded_state_dict",
        "if not hasattr(self, 'tp_group'): # some model interface hasn't updated for m4, fallback needed tp_group = "
        "parallel_state.get_tensor_model_parallel_group()",
    ),
    (
        "models/heads.py",
        "transformer.utils:make_sharded_tensors_for_checkpoint",
        "if tp_group is None and dp_cp_group is None: tp_group = get_tensor_model_parallel_group_if_none(tp_group)",
    ),
    (
        "optim/factory.py",
        "optimizer:_get_param_groups",
        "torch.distributed.all_gather_object(gathered_params_key, params_key)",
    ),
    (
        "optim/factory.py",
        "models.mimo.optimizer:_get_replica_id",
        "return (pg_collection.tp.rank(), pg_collection.pp.rank(), pg_collection.dp.rank())",
    ),
    (
        "optim/module_optimizer.py",
        "models.mimo.optimizer:MimoOptimizer.get_grad_norm",
        "torch.distributed.all_reduce(",
    ),
    (
        "optim/module_optimizer.py",
        "optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
        "for key in param_group_identifier_keys:",
    ),
    (
        "models/fusions.py",
        "tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32( total_input, grad_output, weight.main_grad )",
    ),
    (
        "models/offload.py",
        "transformer.transformer_config:TransformerConfig.__post_init__",
        "if self.cpu_offloading and self.pipeline_model_parallel_size > 1: raise ValueError(",
    ),
    (
        "models/recompute.py",
        "transformer.transformer_layer:TransformerLayer",
        "mlp_output_with_bias = tensor_parallel.checkpoint(",
    ),
    (
        "models/recompute.py",
        "tensor_parallel.random:CheckpointWithoutOutput._recompute",
        "share_storage = _get_share_storage()",
    ),
    (
        "models/sharding.py",
        "distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.__init__",
        'DeviceMesh.from_group(self.process_group, "cuda")',
    ),
    (
        "optim/muon.py",
        "optimizer.emerging_optimizers",
        "HAVE_EMERGING_OPTIMIZERS = False",
    ),
    (
        "cpu/kernels.py",
        "tensor_parallel.cross_entropy:VocabParallelCrossEntropy.calculate_predicted_logits",
        "vocab_parallel_logits -= logits_max.unsqueeze(dim=-1)",
    ),
    (
        "debug/rerun.py",
        "utils:check_param_hashes_across_dp_replicas",
        "parallel_state.get_data_parallel_group(with_gtp_remat=False)",
    ),
]


@pytest.mark.parametrize(("ours", "place", "written"), REASONS, ids=[f"{ours}-{place}" for ours, place, _ in REASONS])
def test_the_reason_of_an_adaptation_is_still_there(ours, place, written):
    assert (ROOT / "mimo_train" / ours).exists()
    source = re.sub(r"\s+", " ", inspect.getsource(resolve_name(CORE + place)))
    assert written in source, f"{CORE}{place} has changed: is mimo_train/{ours} still needed?"


def test_the_vocabulary_s_padding_counts_in_the_softmax_of_megatron_core():
    """Else `models/language_model.py` need not hide it."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    assert "vocab_size" not in inspect.getsource(LanguageModule.compute_language_model_loss)


def test_torch_reduces_parameters_with_a_gradient_alone():
    """Else `models/sharding.py` need not make zeros for the others."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    source = inspect.getsource(FSDPParamGroup.post_backward)
    assert "elif fsdp_param.unsharded_param.grad is not None:" in source and "if not self.reduce_grads:" in source


def test_torch_s_launcher_passes_a_signal_to_ranks_as_an_error():
    """Else `launch/torchrun.py` would not be needed for a run that is asked to save and stop."""
    from torch.distributed.elastic.multiprocessing import api

    assert "raise SignalException(" in inspect.getsource(api._terminate_process_handler)


def test_a_message_of_torch_has_no_place_for_what_a_recorder_knows_of_it():
    """Else `parallel/collectives.py` need not keep works by their identity."""
    from torch.distributed import Work

    assert Work.__dictoffset__ == 0


def test_soundfile_prints_a_traceback_where_a_damaged_header_makes_it_seek_wrongly(monkeypatch):
    """Else `data/media/audio_files.py` need not ignore such a seek."""
    import soundfile

    from data.media.audio_files import AudioFile

    buffer = BytesIO()
    soundfile.write(buffer, [0.0] * 400, 8000, format="AIFF", subtype="PCM_16")
    damaged = buffer.getvalue()[:38] + b"\xff" + buffer.getvalue()[39:]
    printed: list = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    for kind, number in ((AudioFile, 0), (BytesIO, 1)):
        with suppress(Exception), soundfile.SoundFile(kind(damaged)):
            pass
        assert len(printed) == number, kind


def test_torchaudio_s_resampler_keeps_a_filter_for_every_phase():
    """Else `data/media/audio.py` need not evaluate them where they are needed."""
    from torchaudio.functional.functional import _get_sinc_resample_kernel

    rate, wanted = 1009, 512
    table, width = _get_sinc_resample_kernel(rate, wanted, 1)
    assert table.numel() == wanted * (rate + 2 * width)


def test_torch_has_no_kernel_of_rms_norm_for_meta_tensors():
    """`mimo_train/preflight/dry_run/fake_tensors.py`: on CUDA it has one."""
    import torch

    name = "aten::_fused_rms_norm"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has(name, "Meta") and (has(name, "CUDA") or not torch.version.cuda)


def test_torch_composes_rms_norm_on_the_cpu():
    """Else `cpu/kernels.py` need not compute it."""
    import torch

    inputs, weight = torch.ones(3, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    assert type(torch.nn.functional.rms_norm(inputs, (4,), weight, 1e-5).grad_fn).__name__ == "MulBackward0"


def test_torchs_attention_on_the_cpu_computes_scores_again():
    """Else `cpu/attention.py` need not keep them: from the sums of their exponentials it does."""
    import torch

    parts = [torch.ones(1, 2, 128, 8, requires_grad=True) for _ in range(3)]
    attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    assert attended.grad_fn._saved_logsumexp.shape == (1, 2, 128)


def test_torch_s_optimizer_and_masks_import_its_compiler():
    """Else `optim/group_optimizer.py` need not unwrap methods, nor `models/attention.py` import a mask late."""
    from torch import _compile
    from torch.nn.attention import bias
    from torch.optim import Optimizer

    assert "import torch._dynamo" in inspect.getsource(_compile._disable_dynamo)
    for method in (Optimizer.add_param_group, Optimizer.zero_grad, Optimizer.state_dict, Optimizer.load_state_dict):
        assert "@torch._disable_dynamo" in inspect.getsource(method), method
    assert "\ntorch._dynamo.allow_in_graph(" in inspect.getsource(bias)


def test_torch_reduces_only_gradients_that_a_rank_has():
    """Else `models/sharding.py` need not give zeros to the others."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert "elif fsdp_param.unsharded_param.grad is not None:" in inspect.getsource(FSDPParamGroup.post_backward)


def test_the_stance_of_torch_s_compiler_imports_it():
    """Else `cpu/backend.py` need not wait with it."""
    from torch import compiler

    assert "import torch._dynamo" in inspect.getsource(compiler.set_stance)


def test_omegaconf_reads_texts_as_numbers_of_base_60():
    """Else `config/run_files.py` need not replace its loader."""
    assert OmegaConf.create("run: {dir: 12:30}").run.dir == 750


def test_every_adaptation_on_the_page_has_its_reason():
    page = (ROOT / "docs" / "architecture.md").read_text().split("## Adaptations", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(?:mimo_train/)?(\S+)` \|.*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    looked_at = {ours for ours, _, _ in REASONS} | {
        "models/language_model.py",
        "launch/torchrun.py",
        "parallel/collectives.py",
    }
    looked_at |= {f"data/media/{name}.py" for name in ("audio_files", "audio")}
    looked_at |= {"cpu/attention.py", "cpu/kernels.py", "cpu/backend.py"}
    looked_at |= {"config/run_files.py", "models/sharding.py", "data/rows/segments.py"}
    by_running = (
        "test_dense_layer.py",
        "test_tensors.py",
        "test_special_text.py",
        "test_chat_renderer.py",
        "test_device.py",
        "test_projectors.py",
        "test_memory.py",
        "test_groups.py",
        "test_dry_run.py",
    )
    for ours, tests in rows:
        assert ours in looked_at or any(test in tests for test in by_running), ours
