"""FusedLoraLinear: PEFT's LoRA layer in a block, whose adapter is added where the frozen layer's product is.

With s the scaling of the adapter, the forward computes u = x Aᵀ and y = x Wᵀ + b + s u Bᵀ, the backward du = s dy B,
dx = dy W + du A, dA = duᵀ x and dB = s dyᵀ u. PEFT computes the same with a tensor of the output's size for u Bᵀ, one
for its multiple and one for the sum, and in backward two more; here cuBLAS adds to what is there (Hu et al., "LoRA:
Low-Rank Adaptation of Large Language Models", 2021). Autograd keeps x and u, as for PEFT.
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

    Its own forward runs for what is not one plain adapter in the dtype of its frozen layer: with dropout, several
    active adapters, DoRA and other variants, merged or disabled adapters, autocast, a layer that is trained, or hooks
    on the modules inside; and in compiled code, where the compiler fuses.
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


def _adapter_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
    """Return A, B and the scaling of the adapter that is to be added, None if PEFT's own forward has to run."""
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
    same = x.dtype == base.weight.dtype == a.weight.dtype == b.weight.dtype
    if not same or a.bias is not None or b.bias is not None or torch.is_autocast_enabled(autocast_type(x.device)):
        return None
    return a.weight, b.weight, layer.scaling[name]


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether `module` computes what torch.nn.Linear does."""
    return type(module).forward is torch.nn.Linear.forward and "forward" not in vars(module)


class LoraProduct(torch.autograd.Function):
    """y = x Wᵀ + b + s u Bᵀ with u = x Aᵀ. x: (..., K). A: (r, K). B: (N, r). W is frozen.

    transposed: W is (K, N), as that of transformers' Conv1D, and not (N, K).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling: float, transposed: bool):
        ctx.scaling, ctx.transposed = scaling, transposed
        flat = x.reshape(-1, x.shape[-1])
        u = flat @ a.t()
        y = linear(flat, weight.t() if transposed else weight, bias).addmm_(u, b.t(), alpha=scaling)
        ctx.save_for_backward(x, weight, a, b, u)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        x, weight, a, b, u = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        dy, dx, da, db = dy.reshape(-1, dy.shape[-1]), None, None, None
        du = (dy @ b).mul_(ctx.scaling)
        if needs_b:
            db = (dy.t() @ u).mul_(ctx.scaling)
        if needs_a:
            da = du.t() @ x.reshape(-1, x.shape[-1])
        if needs_x:
            dx = (dy @ (weight.t() if ctx.transposed else weight)).addmm_(du, a).view(x.shape)
        return dx, None, None, da, db, None, None
