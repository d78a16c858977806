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

from ...engine.base.torch_internals import autocast_type, functorch_transforms_active, has_global_hooks
from ...engine.blocks.sharded_module import extend_class
from ...engine.tensors.backward import double_backward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedLoraLinear(torch.nn.Module):
    """A LoRA layer of PEFT's, extended in place.

    Its own forward runs for what is not one plain adapter of a frozen layer: with dropout, several active adapters,
    DoRA and other variants, merged or disabled adapters, a base layer in float8 or with a forward of its own, hooks on
    the modules inside, or, without autocast, an adapter of another dtype; in compiled code, where the compiler fuses;
    under transforms of torch.func; with a scaling that is a tensor; and in float32, so that it is rounded as by PEFT.
    """

    base_layer: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs or torch.compiler.is_compiling() else _adapter_of(self, x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        flat = x.reshape(-1, x.shape[-1])
        y: Any = LoraProduct.apply(flat, base.weight, base.bias, *adapter, not isinstance(base, torch.nn.Linear))
        return y.view(*x.shape[:-1], y.shape[-1])  # outside: a view that a Function returns cannot be modified in place


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
    return hasattr(module, "lora_variant") and _is_supported(module.base_layer)


def _adapter_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, float, torch.dtype] | None:
    """Return A, B, the scaling and the dtype to compute in, None if PEFT's own forward has to run."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or layer.disable_adapters or layer.merged or active[0] in layer.lora_variant:
        return None
    name, base = active[0], layer.base_layer
    a, b, dropout, scaling = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], layer.scaling[name]
    if (dropout.training and getattr(dropout, "p", 0) > 0) or not isinstance(scaling, (int, float)):
        return None
    if not (_is_plain(a) and _is_plain(b) and _is_supported(base)) or functorch_transforms_active():
        return None
    if has_global_hooks() or any(getattr(module, hooks) for module in (base, a, b, dropout) for hooks in _HOOKS):
        return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    if a.bias is not None or b.bias is not None or not x.is_floating_point() or x.is_nested:
        return None
    kind, dtype = autocast_type(x.device), x.dtype
    dtypes = {x.dtype, base.weight.dtype, a.weight.dtype, b.weight.dtype}
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind)
    elif len(dtypes) > 1:
        return None
    if dtype == torch.float32:
        return None
    return a.weight, b.weight, scaling, dtype


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether `module` computes what torch.nn.Linear does."""
    return type(module).forward is torch.nn.Linear.forward and "forward" not in vars(module)


def _is_supported(base: torch.nn.Module) -> bool:
    """Return whether `base` computes what torch.nn.Linear or transformers' Conv1D does, in the weight's own dtype."""
    return _is_plain(base) or (
        type(base).forward.__module__ == "transformers.pytorch_utils" and "forward" not in vars(base)
    )


class LoraProduct(torch.autograd.Function):
    """y = x Wᵀ + b + s u Bᵀ with u = x Aᵀ, of `dtype`. x: (rows, K). A: (r, K). B: (N, r). W and b are frozen.

    transposed: W is (K, N), as that of transformers' Conv1D, and not (N, K).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling: float, dtype: torch.dtype, transposed: bool):
        ctx.scaling, ctx.transposed, ctx.dtype, ctx.dtypes = scaling, transposed, dtype, (x.dtype, a.dtype, b.dtype)
        flat, whole = x.to(dtype), weight.to(dtype)
        u = flat @ a.to(dtype).t()
        y = linear(flat, whole.t() if transposed else whole, None if bias is None else bias.to(dtype))
        y.addmm_(u, b.to(dtype).t(), alpha=scaling)
        _, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(flat if needs_a else None, weight, a, b, u if needs_b else None)
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        x, weight, a, b, u = ctx.saved_tensors
        weight, a, b = (each.to(ctx.dtype) for each in (weight, a, b))
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        dx = da = db = None
        if needs_b:
            db = _scaled_product(dy.t(), u, ctx.scaling).to(ctx.dtypes[2])
        if needs_a or needs_x:
            du = _scaled_product(dy, b, ctx.scaling)
            if needs_a:
                da = (du.t() @ x).to(ctx.dtypes[1])
            if needs_x:
                dx = (dy @ (weight.t() if ctx.transposed else weight)).addmm_(du, a).to(ctx.dtypes[0])
        return dx, None, None, da, db, None, None, None


def _scaled_product(one: Tensor, other: Tensor, factor: float) -> Tensor:
    """Return factor · one @ other, rounded once: in float16 the product alone may overflow."""
    return one.new_empty(one.shape[0], other.shape[1]).addmm_(one, other, beta=0, alpha=factor)
