"""Weights in 4 bits on a GPU: the bytes and the numbers of a CPU. Skipped where there is no CUDA device."""

import pytest
import torch

from mimo_train.models.lora.quantized import dequantize, quantize

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_quantizes_as_a_cpu(dtype):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1), dtype=dtype)
    here, there = quantize(weight), quantize(weight.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
    assert torch.equal(dequantize(*here, dtype), dequantize(*there, dtype).cpu())
