"""Export a checkpoint to a temporary folder, and serve it with vLLM."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from data.storage.url import Place, Url
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.resume.same_run import recorded_config
from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.config_of_directory import is_directory_of_a_model
from mimo_train.evaluation.benchmarks.vllm_server import VllmServer
from mimo_train.evaluation.export import export
from mimo_train.launch.exit_signal import interrupted_by_sigterm

VARIABLE = "MIMO_VLLM"
"""Environment variable with the Python of an environment that has vLLM."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def vllm_python(option: str = "") -> str:
    """Return the Python that has vLLM. Raises UserError if neither the option nor the variable names a file."""
    python = option or os.environ.get(VARIABLE, "")
    if not Path(python).is_file():
        raise UserError(
            f"--vllm: expected the Python of an environment that has vLLM, got {python or 'none'!r}. Set it, or "
            f"{VARIABLE}"
        )
    return python


@contextmanager
def served(
    place: Place, python: str, *, trust_code: bool = False, arguments: Sequence[str] = (), ema: bool = False
) -> Iterator[VllmServer]:
    """Serve the model of a checkpoint, or a `transformers` directory as it is, while the context lasts.

    Args:
        python: see `vllm_python`.
        arguments: further arguments of `vllm serve`.
        ema: serve the average of a checkpoint's weights.

    Raises:
        UserError: the job has several processes, the export is several directories, or vLLM cannot serve it.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("--backend: vllm needs one process, and vLLM's own --tensor-parallel-size in --vllm-arguments")
    handle, log = tempfile.mkstemp(prefix="mimo-train-vllm-", suffix=".log")
    os.close(handle)
    with tempfile.TemporaryDirectory(prefix="mimo-train-export-") as temporary:
        folder, dtype = Path(temporary), "auto"
        if not isinstance(place, Url) and is_directory_of_a_model(place):
            folder = place
        else:
            dtype = _export(folders.in_folder(place, "CHECKPOINT"), folder, trust_code=trust_code, ema=ema)
        with interrupted_by_sigterm(), VllmServer(python, folder, dtype, Path(log), arguments) as server:
            yield server
    os.unlink(log)  # after an error it stays


def _export(checkpoint: Place, to: Path, *, trust_code: bool, ema: bool) -> str:
    """Export a checkpoint with its adapters merged; returns vLLM's name of its dtype."""
    cfg = recorded_config(checkpoint, trust_code=trust_code, weights=True)
    if name := next((name for name, module in cfg.encoders.items() if module.encoder.sound), ""):
        reason = f"vllm reads videos without sound, and modules.{name}.encoder.sound is true"
        raise UserError(f"--backend: {reason}. Leave out --backend vllm")
    merge = any(module.lora.rank for module in cfg.modules.values())
    try:
        _, reason = export(checkpoint, cfg, to, dtype="", largest_file=5 * 10**9, merge=merge, ema=ema)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if reason:
        raise UserError(f"--backend: vllm serves one directory, and the export of this run is several: {reason}")
    return _DTYPES[cfg.train.precision]
