"""Matmuls, SwiGLU, RMSNorm and cross-entropy on a CPU, each faster than torch's.

Torch 2.11 has no CPU kernel of RMSNorm: it composes seven operations, which take twenty passes over the hidden states
with their backward. It calls MKL for fp32 matmuls; oneDNN takes 0.80 to 0.97 of its time. Megatron-Core 0.19.2
(tensor_parallel/cross_entropy.py) makes five passes over the logits, because ranks may have parts of the vocabulary.

Shape suffixes: F feed-forward size, H hidden size, O outputs, T all other dimensions as one, N tokens, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

ROWS, WIDTH = 128, 384
"""Rows, and inputs and outputs, from which `linear` calls oneDNN: it is slower for fewer rows or a narrower weight."""


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return inputs @ weight^T + bias, as `torch.nn.functional.linear`; with oneDNN for large fp32 matmuls on a CPU.

    Args:
        inputs: [..., H].
        weight: [O, H].
        bias: [O].
    """
    is_supported = (
        min(weight.shape) >= WIDTH
        and inputs.numel() >= ROWS * inputs.size(-1)
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )
    return _Linear.apply(inputs, weight, bias) if is_supported else F.linear(inputs, weight, bias)


def _matmul(rows_TH: torch.Tensor, weight_OH: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    product_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_TH, weight_OH, bias_O, "none", [], "")
    return product_TO


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight_OH: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.shape = inputs.shape
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight_OH)
        return _matmul(inputs, weight_OH, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight_OH = ctx.saved_tensors
        to_inputs, to_weight, to_bias = ctx.needs_input_grad
        gradient_TO = gradients[0].reshape(-1, len(weight_OH))
        inputs_gradient = _matmul(gradient_TO, weight_OH.T).view(ctx.shape) if to_inputs else None
        weight_gradient = _matmul(gradient_TO.T, inputs.reshape(-1, inputs.size(-1)).T) if to_weight else None
        return inputs_gradient, weight_gradient, gradient_TO.sum(0) if to_bias else None


def swiglu(inner: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [..., F], of [..., 2 * F]: the gate, then up. Writes both gradients into one tensor."""
    if torch.is_grad_enabled() and inner.device.type == "cpu" and not torch.compiler.is_compiling():
        gated: torch.Tensor = _SwiGLU.apply(inner)
        return gated
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(inner, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        inner, activated = ctx.saved_tensors
        inner_gradient = torch.empty_like(inner)
        (gate, up), (to_gate, to_up) = inner.chunk(2, dim=-1), inner_gradient.chunk(2, dim=-1)
        torch.mul(gradients[0], activated, out=to_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=to_gate)
        return inner_gradient


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `rms_norm`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize [..., H] over the last dimension."""
        return rms_norm(inputs, self.weight, self.eps)


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Return inputs / rms(inputs) * weight, over the last dimension. The forward pass gives torch's numbers.

    Args:
        inputs: [..., H].
        weight: [H].
        eps: added to the mean of squares; None: the smallest number of the type of `inputs`.
    """
    is_supported = (
        torch.is_grad_enabled()
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and eps is not None
        and not torch.compiler.is_compiling()
    )
    return _RMSNorm.apply(inputs, weight, eps) if is_supported else F.rms_norm(inputs, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        scale = inputs.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = inputs * scale
        ctx.save_for_backward(normed, scale, weight_H)
        return normed * weight_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale, weight_H = ctx.saved_tensors
        (gradient,) = gradients
        to_inputs, to_weight, _ = ctx.needs_input_grad
        products_TH = (gradient * normed).reshape(-1, len(weight_H))
        inputs_gradient = None
        if to_inputs:
            # Subtract the part that only changes the length of a row.
            along = torch.mv(products_TH, weight_H).view_as(scale).div_(-len(weight_H))
            inputs_gradient = (gradient * weight_H).addcmul_(normed, along).mul_(scale)
        return inputs_gradient, products_TH.sum(0) if to_weight else None, None


BLOCK = 2**15
"""Elements whose squares are added in fp32 on a CPU."""


def norm_blocks(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parts of a flat tensor whose norms are accurate in fp32. On a CPU torch adds all squares one after the
    other: the norm of 10^7 normal numbers is off by 4e-4, that of 10^8 by 1e-2. Blocks keep it at 1e-6; CUDA adds in a
    tree."""
    return flat.split(BLOCK) if flat.is_cpu else (flat,)


def supports_cross_entropy(logits: torch.Tensor, tp_group: torch.distributed.ProcessGroup) -> bool:
    """True if `cross_entropy` supports these logits: on a CPU, with the whole vocabulary."""
    return logits.device.type == "cpu" and tp_group.size() == 1


def cross_entropy(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the losses [N] in nats, fp32. A label outside of the vocabulary gives the loss of the most likely token,
    with the gradient of its normalization alone, as in Megatron-Core. The gradient reuses the memory of fp32 logits, so
    backward runs once."""
    losses: torch.Tensor = _CrossEntropy.apply(logits_NV, labels_N)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        logits_NV = logits_NV.float()
        is_token_N = (labels_N >= 0) & (labels_N < logits_NV.size(1))
        # The kernel reads a whole row before it writes.
        log_p_NV = torch.log_softmax(logits_NV, -1, out=logits_NV)
        labels_N1 = labels_N.where(is_token_N, 0).unsqueeze(1)
        losses_N = -log_p_NV.gather(1, labels_N1).squeeze(1).where(is_token_N, log_p_NV.amax(1))
        ctx.save_for_backward(log_p_NV, labels_N1, is_token_N)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_p_NV, labels_N1, is_token_N = ctx.saved_tensors
        p_NV = torch.softmax(log_p_NV, -1, out=log_p_NV)
        p_NV.scatter_add_(1, labels_N1, -is_token_N.to(p_NV.dtype).unsqueeze(1))
        return p_NV.mul_(gradients[0].unsqueeze(1)), None
