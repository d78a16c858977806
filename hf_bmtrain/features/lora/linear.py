"""FusedLoraLinear: PEFT's LoRA layer, changed to add the outputs of its adapters to the frozen layer's output in place.

With the adapter's scaling s, the forward computes u = x Aᵀ and y = x Wᵀ + b + s u Bᵀ. The backward computes
du = s dy B, dx = dy W + du A, dA = duᵀ x and dB = s dyᵀ u. PEFT computes the same, but allocates three tensors of the
output's size in the forward, for u Bᵀ, s u Bᵀ and the sum, and two more in the backward. Here cuBLAS adds the products
to y and dx in place. `factors` computes the products with A and B, in one of two modes:

* *rounded*: A and B are converted to the dtype that the layer computes in, as by autocast.
* *split*: used if A and B are float32 (PEFT's default), and the layer computes in bfloat16 without autocast. A and B
  are represented as sums of bfloat16 matrices. PEFT instead converts x and dy to float32, and multiplies in float32.

[Note: kernels and bytes] For one layer with M rows, K inputs and N outputs, the table contains the number of kernels
and the memory traffic ("moved"), both without the two products of the frozen layer. The unit of traffic is M elements
of 2 bytes: "1 K" means one pass over a bfloat16 matrix (M, K). Matrices that have r rows or columns are not counted.

                        PEFT, float32    split          PEFT, autocast   rounded
    kernels, forward    7                5              9                5
    kernels, backward   10               8              11               5
    moved, forward      5 K + 14 N       1 K + 2 N      7 K + 6 N        1 K + 2 N
    moved, backward     10 K + 14 N      3 K + 2 N      11 K + 4 N       3 K + 2 N

PEFT's numbers are the same under DistributedDataParallel. Of the 13 kernels of *split*, 5 are short: they touch only A,
B, u or du.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...engine.base.torch_internals import (
    autocast_type,
    functorch_transforms_active,
    has_global_hooks,
    has_hooks,
    has_wide_products,
)
from ...engine.blocks.autograd import apply_function
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_module
from ...engine.tensors.backward import double_backward
from .factors import (
    Adapter,
    add_masked,
    add_products,
    draw_mask,
    enter,
    factors_of,
    gradient_of_a,
    gradient_of_b,
)

_log = logging.getLogger("hf_bmtrain")
_LAYERS = (("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit"))
COMPILES = torch.__version__ >= "2.11"
"""Whether torch compiles a FusedLoraLinear without graph breaks. If not (before torch 2.11), compiled blocks keep
PEFT's layers."""
_logged: set[str] = set()


class FusedLoraLinear(OnlyWhileSharded):
    """PEFT's LoRA layer, changed in place so that its forward adds the adapters with fewer kernels and less memory.

    `fuse_lora` changes layers to this class. The layer still runs PEFT's own forward in these cases:

    * Its adapters, base layer, hooks, dtypes or arguments are not supported. The reason is logged once.
    * No adapter is active, or the adapters are disabled or merged.
    * It computes in float32.
    * A transform of torch.func is active.
    * It is compiled, because torch.compile fuses PEFT's forward equally well. Exception: if all its adapters are
      float32, and it computes in bfloat16 without autocast (the mode *split* in this file's docstring), a compiled
      layer runs the fused forward, too.

    Attributes:
        base_layer: the frozen layer.
        wide: whether the device can multiply two 16-bit matrices and return their product in float32, not rounded to 16
            bits.
    """

    base_layer: Any
    wide: ClassVar[bool]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = "forward was called with more arguments than the input" if args or kwargs else _adapters_of(self, x)
        if isinstance(found, str):
            if found and not torch.compiler.is_compiling():
                _log_once(found, self)
            return super().forward(x, *args, **kwargs)
        dtype, adapters, matrices = found
        base = self.base_layer
        flat = x.reshape(-1, x.shape[-1])
        transposed = not isinstance(base, torch.nn.Linear)
        y: Any = apply_function(
            LoraProduct, flat, base.weight, base.bias, transposed, dtype, flat.requires_grad, adapters, *matrices
        )
        # Reshape y here and not in LoraProduct: a view that an autograd.Function returns cannot be modified in place.
        return y.view(*x.shape[:-1], y.shape[-1])


def fuse_lora(modules: Iterable[torch.nn.Module], device: torch.device | None = None) -> int:
    """Turn PEFT's LoRA layers among `modules` into FusedLoraLinear layers, in place, which makes their forwards faster.

    Args:
        modules: any modules. Modules that are not PEFT's LoRA layers, or are fused already, are left alone.
        device: the device on which the layers compute; None for the CPU.

    Returns:
        The number of layers that were changed.
    """
    wide = device is None or has_wide_products(device)
    found = [module for module in modules if _is_lora(module)]
    for module in found:
        extend_module(module, FusedLoraLinear, wide=wide)
    return len(found)


def _is_lora(module: Any) -> bool:
    """Return whether `module` is a PEFT LoRA layer around a linear layer or transformers' Conv1D, and not yet fused."""
    cls = type(module)
    if (cls.__module__, cls.__name__) not in _LAYERS or isinstance(module, FusedLoraLinear):
        return False
    return hasattr(module, "lora_variant") and _is_supported(module.base_layer)


Found = tuple[torch.dtype, tuple[Adapter, ...], list[Tensor]]


def _adapters_of(layer: Any, x: Tensor) -> Found | str:
    """Return the values that the fused forward of a LoRA layer needs, or a string if PEFT's own forward must run.

    The values are a tuple of three:

    * the dtype in which the fused forward computes,
    * a tuple with the settings (`Adapter`) of each active adapter,
    * a list of the adapters' matrices: A₁, B₁, A₂, B₂ and so on.

    The string is the reason, which the caller logs, or "" if nothing is to be logged.

    layer: the LoRA layer.
    x: the input of its forward.
    """
    # Every forward of every LoRA layer runs this function, so each attribute of a module is read only once: such a read
    # takes as long as ten lines of Python without it.
    all_a, all_b, dropouts = layer.lora_A, layer.lora_B, layer.lora_dropout
    names = [name for name in layer.active_adapters if name in all_a]
    if not names or layer.disable_adapters or layer.merged:
        return ""
    base, compiling = layer.base_layer, torch.compiler.is_compiling()
    if not _is_supported(base):
        return "the base layer has a custom forward"
    weight, bias = base.weight, base.bias
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "the base layer is trainable"
    if not compiling and functorch_transforms_active():
        return ""
    if not x.is_floating_point() or x.is_nested:
        return "the input is a nested tensor, or its dtype is not floating-point"
    if has_global_hooks() or has_hooks(base):
        return "hooks are registered on the base layer, or globally for all modules"
    given, kind = x.dtype, autocast_type(x.device)
    found = []  # the modules and matrices of each adapter
    dtypes = [given, weight.dtype]
    for name in names:
        one, other = all_a[name], all_b[name]
        found.append((name, one, other, one.weight, other.weight))
        dtypes += [found[-1][3].dtype, found[-1][4].dtype]
    dtype, rounds = given, False
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:  # autocast does not convert float64
        dtype, rounds = torch.get_autocast_dtype(kind), True
    elif given != weight.dtype:
        return f"the input is {given}, but the base layer's weight is {weight.dtype}"
    if not _returns(base, given, dtype):
        return (
            f"the base layer, a bitsandbytes layer, has input {given} and compute_dtype {base.compute_dtype}, but "
            f"both must be {dtype}"
        )
    adapters, matrices = [], []
    for name, one, other, a, b in found:
        dropout, scaling = dropouts[name], layer.scaling[name]
        if name in layer.lora_variant:
            return (
                f"{type(layer.lora_variant[name]).__name__.removesuffix('LinearVariant')} adapters are not simply "
                "added to the base layer's output"
            )
        if not isinstance(scaling, (int, float)):
            return "the adapter's scaling is a tensor"
        if not (_is_plain(one) and _is_plain(other)):
            return "A or B has a custom forward"
        if has_hooks(one) or has_hooks(other) or has_hooks(dropout):
            return "hooks are registered on A, B or the dropout"
        if one.bias is not None or other.bias is not None:
            return "the adapter has a bias (lora_bias=True)"
        rate = _rate(dropout)
        if rate is None:
            return f"the dropout layer {dropout} is not supported"
        split = not rounds and a.dtype == b.dtype == torch.float32 and dtype == torch.bfloat16
        if not (rounds or split or a.dtype == b.dtype == dtype):
            range_ = ", whose range is too small for float32 matrices" if dtype == torch.float16 else ""
            return f"A is {a.dtype}, B is {b.dtype}, but the base layer computes in {dtype}{range_}"
        if split and not (layer.wide and getattr(layer, "cast_input_dtype_enabled", True)):
            return (
                "this torch or GPU cannot multiply bfloat16 matrices with a float32 result, or PEFT's conversion of "
                "the input is disabled"
            )
        adapters.append(Adapter(scaling / (1 - rate), rate, split, layer.wide, a.requires_grad, b.requires_grad))
        matrices += [a, b]
    if dtype == torch.float32 or (compiling and not all(each.split for each in adapters)):
        return ""
    return dtype, tuple(adapters), matrices


def _log_once(reason: str, layer: Any) -> None:
    """Log on rank 0 why the LoRA layer `layer` runs PEFT's own forward. Each reason is logged once."""
    if reason not in _logged:
        _logged.add(reason)
        name = getattr(layer, "_bmt_name", "")  # set only on rank 0, so other ranks do not log
        if name:
            _log.info("LoRA layers, such as '%s', run PEFT's own forward, which is slower. Reason: %s", name, reason)


def _rate(dropout: torch.nn.Module) -> float | None:
    """Return the current probability of a dropout layer, or None if `draw_mask` cannot compute this kind of dropout.

    The probability is 0 in evaluation, and for torch.nn.Identity.
    """
    if type(dropout) is torch.nn.Dropout:
        rate = dropout.p if dropout.training else 0.0
        return rate if rate < 1 and not dropout.inplace else None
    return 0.0 if type(dropout) is torch.nn.Identity else None


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether `module` computes the same as torch.nn.Linear."""
    return type(module).forward is torch.nn.Linear.forward and "forward" not in vars(module)


def _is_supported(base: torch.nn.Module) -> bool:
    """Return whether `base` computes the same as torch.nn.Linear or transformers' Conv1D, in any dtype.

    Also True for bitsandbytes' Linear4bit while its block runs, because its weight is then unpacked to a floating-point
    tensor.
    """
    if _is_plain(base):
        return True
    if "forward" in vars(base):
        return False
    return type(base).forward.__module__ == "transformers.pytorch_utils" or _is_four_bit(base)


def _is_four_bit(base: Any) -> bool:
    """Return whether `base` is a bitsandbytes Linear4bit whose 4-bit weight is unpacked to a floating-point tensor."""
    return type(base).__name__ == "Linear4bit" and hasattr(base, "compute_dtype") and base.weight.is_floating_point()


def _returns(base: Any, given: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether the frozen layer `base` computes its output in `dtype`, given an input of dtype `given`.

    False is possible only for bitsandbytes' Linear4bit, because its attribute `compute_dtype` selects the dtype.
    """
    return not _is_four_bit(base) or (given == dtype and base.compute_dtype in (None, dtype))


def _all_split(adapters: tuple[Adapter, ...]) -> bool:
    return all(adapter.split for adapter in adapters)


class LoraProduct(torch.autograd.Function):
    """The autograd function of a frozen linear layer with LoRA adapters: y = x Wᵀ + b + Σ s u Bᵀ with u = x Aᵀ.

    The sum is over the adapters. The backward computes gradients of x, A and B, but not of W and b. FusedLoraLinear
    calls `apply` in its forward. The arguments of `apply`, in this order, are:

    x: (rows, K).
    weight: W, frozen: (N, K) or, if `transposed`, (K, N).
    bias: b, frozen: (N,) or None.
    transposed: whether W is stored as (K, N), as in transformers' Conv1D.
    dtype: the dtype of all products and of y. x, W and b are converted to it.
    needs_x: whether x needs a gradient.
    adapters: a tuple with the settings (`Adapter`) of each adapter, which include its scaling s.
    *matrices: A (r, K) and B (N, r) of the first adapter, then A and B of the second, and so on.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, transposed: bool, dtype: torch.dtype, needs_x: bool, adapters, *matrices):
        flat, full = x.to(dtype), weight.to(dtype)
        y = linear(flat, full.t() if transposed else full, None if bias is None else bias.to(dtype))
        kept: list[Tensor | None] = [weight]
        us: list[Tensor] = []
        factors: list[Tensor] = []
        for index, adapter in enumerate(adapters):
            a, b = matrices[2 * index], matrices[2 * index + 1]
            seen, mask = flat, None
            if adapter.rate > 0:
                mask = draw_mask(flat, adapter.rate)
                seen = flat * mask
            of_a, of_b = factors_of(a, b, dtype, adapter)
            u = enter(seen, of_a, adapter, a.shape[0], False)
            us.append(u)
            factors.append(of_b)
            needs_u = needs_x or adapter.needs_a  # whether backward computes du, the gradient of u
            kept += [seen if adapter.needs_a else None, mask if needs_x else None]
            kept += [of_a if needs_x else None, of_b if needs_u else None, u if adapter.needs_b else None]
        scalings = [1.0 if each.split else each.scaling for each in adapters]
        y = add_products(y, us, factors, scalings, _all_split(adapters))
        ctx.transposed, ctx.dtype, ctx.dtype_of_x = transposed, dtype, x.dtype
        ctx.adapters, ctx.needs_x = adapters, needs_x
        ctx.kinds = [(each.dtype, each.shape) for each in matrices]
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        weight, *kept = ctx.saved_tensors
        dx = None
        if ctx.needs_x:
            full = weight.to(ctx.dtype)
            dx = dy @ (full.t() if ctx.transposed else full)
        gradients: list[Tensor | None] = []
        dus: list[Tensor] = []
        factors: list[Tensor] = []
        for index, adapter in enumerate(ctx.adapters):
            seen, mask, of_a, of_b, u = kept[5 * index : 5 * index + 5]
            (dtype_of_a, shape), (dtype_of_b, _) = ctx.kinds[2 * index : 2 * index + 2]
            rank, da = shape[0], None
            db = gradient_of_b(dy, u, adapter, rank, dtype_of_b) if adapter.needs_b else None
            if adapter.needs_a or ctx.needs_x:
                du = enter(dy, of_b, adapter, rank, True)
                if adapter.needs_a:
                    da = gradient_of_a(du, seen, adapter, rank, dtype_of_a)
                if dx is not None and mask is not None:
                    dx = add_masked(dx, du @ of_a, mask)
                elif dx is not None:
                    dus.append(du)
                    factors.append(of_a)
            gradients += [da, db]
        if dx is not None:
            dx = add_products(dx, dus, factors, [1.0] * len(dus), _all_split(ctx.adapters))
        return None if dx is None else dx.to(ctx.dtype_of_x), None, None, None, None, None, None, *gradients
