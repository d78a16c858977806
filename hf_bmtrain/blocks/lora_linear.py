"""FusedLoraLinear: PEFT's LoRA layer in a block, whose adapter is added where the frozen layer's product is.

With s the scaling of the adapter, the forward computes u = x Aᵀ and y = x Wᵀ + b + s u Bᵀ, the backward du = s dy B,
dx = dy W + du A, dA = duᵀ x and dB = s dyᵀ u. PEFT computes the same with a tensor of the output's size for u Bᵀ, one
for its multiple and one for the sum, and in backward two more; here cuBLAS adds to what is there. Under autocast PEFT
converts x to the adapters' dtype, float32 by default, and autocast converts it back, which autograd keeps for each
layer; here autograd keeps x.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..ops.autocast import autocast_type
from ..runtime.schedule import double_backward
from .base import extend_class

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedLoraLinear(torch.nn.Module):
    """A LoRA layer of PEFT's, extended in place.

    Its own forward runs for what is not one plain adapter of a frozen layer: with dropout, several active adapters,
    DoRA and other variants, merged or disabled adapters, hooks on the modules inside, or, without autocast, an adapter
    of another dtype; in compiled code, where the compiler fuses; and in float32, so that it is rounded as by PEFT.
    """

    base_layer: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs or torch.compiler.is_compiling() else _adapter_of(self, x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        y: Any = LoraProduct.apply(x, base.weight, base.bias, *adapter, not isinstance(base, torch.nn.Linear))
        return y


def fuse_lora(modules: Iterable[torch.nn.Module]) -> int:
    """Extend PEFT's LoRA layers among `modules` that are not yet. Return how many."""
    found = [module for module in modules if _is_lora(module)]
    for module in found:
        module.__class__ = _extended_class(type(module))
    return len(found)


@functools.cache
def _extended_class(cls: Any) -> Any:
    """Return the one class for all LoRA layers of `cls`."""
    return extend_class(FusedLoraLinear, cls, {})


def _is_lora(module: Any) -> bool:
    """Return whether `module` is PEFT's LoRA layer of a linear layer, or of transformers' Conv1D."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("peft.tuners.lora.layer", "Linear") or isinstance(module, FusedLoraLinear):
        return False
    base = module.base_layer
    return hasattr(module, "lora_variant") and (_is_plain(base) or type(base).__name__ == "Conv1D")


def _adapter_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, float, torch.dtype] | None:
    """Return A, B, the scaling and the dtype to compute in, None if PEFT's own forward has to run."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or layer.disable_adapters or layer.merged or active[0] in layer.lora_variant:
        return None
    name, base = active[0], layer.base_layer
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if (dropout.training and getattr(dropout, "p", 0) > 0) or not (_is_plain(a) and _is_plain(b)):
        return None
    if any(getattr(module, hooks) for module in (base, a, b, dropout) for hooks in _HOOKS):
        return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    if a.bias is not None or b.bias is not None or not x.is_floating_point():
        return None
    kind, dtype = autocast_type(x.device), x.dtype
    dtypes = {x.dtype, base.weight.dtype, a.weight.dtype, b.weight.dtype}
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind)
    elif len(dtypes) > 1:
        return None
    if dtype == torch.float32:
        return None
    return a.weight, b.weight, layer.scaling[name], dtype


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether `module` computes what torch.nn.Linear does."""
    return type(module).forward is torch.nn.Linear.forward and "forward" not in vars(module)


class LoraProduct(torch.autograd.Function):
    """y = x Wᵀ + b + s u Bᵀ with u = x Aᵀ, of `dtype`. x: (..., K). A: (r, K). B: (N, r). W and b are frozen.

    transposed: W is (K, N), as that of transformers' Conv1D, and not (N, K).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling: float, dtype: torch.dtype, transposed: bool):
        ctx.scaling, ctx.transposed, ctx.dtypes, ctx.shape = scaling, transposed, (x.dtype, a.dtype, b.dtype), x.shape
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        whole = weight.to(dtype)
        u = flat @ a.to(dtype).t()
        y = linear(flat, whole.t() if transposed else whole, None if bias is None else bias.to(dtype))
        y.addmm_(u, b.to(dtype).t(), alpha=scaling)
        ctx.save_for_backward(flat, weight, a, b, u)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        x, weight, a, b, u = ctx.saved_tensors
        weight, a, b = (each.to(x.dtype) for each in (weight, a, b))
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        dy, dx, da, db = dy.reshape(-1, dy.shape[-1]), None, None, None
        du = (dy @ b).mul_(ctx.scaling)
        if needs_b:
            db = (dy.t() @ u).mul_(ctx.scaling).to(ctx.dtypes[2])
        if needs_a:
            da = (du.t() @ x).to(ctx.dtypes[1])
        if needs_x:
            dx = (dy @ (weight.t() if ctx.transposed else weight)).addmm_(du, a).view(ctx.shape).to(ctx.dtypes[0])
        return dx, None, None, da, db, None, None, None
