"""PEFT's adapters on stacks of experts (`target_parameters`), computed as separate products.

A stack is a 3-D parameter that contains one matrix W per expert. With the rows x of an expert's tokens, W (N, K),
A (r, K), B (N, r) and the scaling s, this file computes x Wᵀ + (x Aᵀ)(s B)ᵀ for all experts at once, by grouped
products. PEFT instead forms W + s B A for all experts in each forward, and autograd then computes a gradient as large
as the stack. The results are equal up to rounding.

PEFT stores A of all E experts as (E r, K), where the expert is the slowest index, and B as (N, r E), where the expert
is the fastest index. A stack is (E, N, K), or transposed, (E, K, N), as in gpt-oss; A and B are the same for both.

This applies to experts of transformers that support `experts_implementation="grouped_mm"`, when the setting is "eager",
"batched_mm" or "grouped_mm", which all compute the same. All other modules run PEFT's own forward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...engine.base.torch_internals import functorch_transforms_active
from ...engine.blocks.sharded_module import extend_class
from ...engine.tensors.backward import double_backward

_log = logging.getLogger("hf_bmtrain")
_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_SETTINGS = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")
_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
_KEYWORD = "lora_factors"
_KERNEL: Any = getattr(torch.nn.functional, "grouped_mm", None)  # public since torch 2.10
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # in bytes; the strides of tensors must be multiples of this for torch's kernel
_logged: set[str] = set()

Factors = list[tuple[Tensor, Tensor, float]]
"""A, B and the scaling of each active adapter of one stack."""


class SplitExperts(torch.nn.Module):
    """Experts of transformers, extended in place: `forward` gets their stacks' adapters by keyword."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        factors = kwargs.pop(_KEYWORD, None)
        return super().forward(*args, **kwargs) if factors is None else run_experts(self, factors, *args, **kwargs)


class SplitWrapper(torch.nn.Module):
    """PEFT's wrapper of a stack, extended in place: it passes its adapters to the experts instead of adding them.

    If several stacks of one module have adapters, PEFT nests their wrappers. Each wrapper adds its adapters to the
    keyword, or it runs PEFT's own forward and the reason is logged once.
    """

    base_layer: Any
    parameter_name: str

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = _factors_of(self)
        if isinstance(found, str):
            if found and not torch.compiler.is_compiling():
                _log_once(found, self)
            return super().forward(x, *args, **kwargs)
        kwargs[_KEYWORD] = {**kwargs.get(_KEYWORD, {}), self.parameter_name: found}
        return self.base_layer(x, *args, **kwargs)


def split_adapters(modules: Iterable[torch.nn.Module]) -> int:
    """Turn PEFT's wrappers of stacks of experts among `modules` into SplitWrappers, in place.

    Args:
        modules: any modules. Modules that are not such wrappers, or are extended already, are left alone.

    Returns:
        The number of wrappers that were extended.
    """
    wrappers: list[Any] = [module for module in modules if _is_wrapper(module)]
    for wrapper in wrappers:
        experts = wrapper.get_base_layer()
        wrapper.__class__ = _extended_class(SplitWrapper, type(wrapper))
        if not isinstance(experts, SplitExperts):
            experts.__class__ = _extended_class(SplitExperts, type(experts))
    return len(wrappers)


@functools.cache
def _extended_class(base: type, cls: Any) -> Any:
    """Return the subclass of `base` and `cls` that all modules of class `cls` get."""
    return extend_class(base, cls, {})


def _is_wrapper(module: Any) -> bool:
    """Return whether `module` is PEFT's wrapper of a stack of experts that transformers can run with grouped_mm."""
    cls = type(module)
    if (cls.__module__, cls.__name__) != _WRAPPER or isinstance(module, SplitWrapper):
        return False
    experts, name = module.get_base_layer(), module.parameter_name
    if name not in _STACKS or not all(hasattr(experts, setting) for setting in _SETTINGS):
        return False
    return getattr(experts, name).dim() == 3 and experts.num_experts > 1 and hasattr(experts, "_apply_gate")


def _factors_of(wrapper: Any) -> Factors | str:
    """Return the factors of the active adapters.

    If PEFT's own forward must run instead, return the reason to log, or "" if it need not be logged.
    """
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names or wrapper.disable_adapters or wrapper.merged:
        return ""
    experts = wrapper.get_base_layer()
    implementation = experts.config._experts_implementation
    if implementation not in _IMPLEMENTATIONS:
        return f"experts_implementation is {implementation!r}"
    if getattr(experts, "_is_expert_parallel", False):
        return "the experts are sharded by expert parallelism"
    if "forward" in vars(experts):
        return "the experts' forward is replaced"
    stack = getattr(experts, wrapper.parameter_name)
    if not stack.is_floating_point() or stack.itemsize < 2:
        return f"the experts are {stack.dtype}"
    if not torch.compiler.is_compiling() and functorch_transforms_active():
        return ""
    factors: Factors = []
    for name in names:
        scaling = wrapper.scaling[name]
        if name in wrapper.lora_variant or not isinstance(scaling, (int, float)):
            return "the adapter is a variant, or its scaling is not a number"
        factors.append((wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, scaling))
    return factors


def _log_once(reason: str, wrapper: Any) -> None:
    """Log on rank 0 why `wrapper` runs PEFT's own forward. Each reason is logged once."""
    name = getattr(wrapper, "split_name", "")  # set on rank 0 alone
    if name and reason not in _logged:
        _logged.add(reason)
        _log.info("adapters on experts, such as '%s', run PEFT's own forward: %s", name, reason)


def run_experts(
    experts: Any, factors: dict[str, Factors], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the output of experts of transformers whose stacks have adapters.

    Args:
        experts: the module, whose stacks are unsharded.
        factors: the adapters of each adapted stack, by the stack's name.
        hidden_states: (tokens, width).
        top_k_index: (tokens, k), the indices of each token's experts.
        top_k_weights: (tokens, k), the factors of their outputs.

    Returns:
        (tokens, width), in the dtype of `hidden_states`.
    """
    tokens, k = top_k_index.shape
    numbers, order = top_k_index.reshape(-1).sort()
    every = torch.arange(experts.num_experts, device=numbers.device, dtype=numbers.dtype)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    grouped = functools.partial(_product, experts, factors, numbers, ends)
    rows = Spread.apply(hidden_states, order, k)
    y = grouped("gate_up_proj" if experts.has_gate else "up_proj", rows)
    y = grouped("down_proj", experts._apply_gate(y) if experts.has_gate else experts.act_fn(y))
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order, None]
    y = torch.empty_like(y).index_copy(0, order, y)  # restore the order of the tokens
    return y.view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def _product(experts: Any, factors: dict[str, Factors], numbers: Tensor, ends: Tensor, name: str, x: Tensor) -> Tensor:
    """Return x times the matrix, plus the bias, of each row's expert, with the adapters of stack `name`.

    x: (rows, K), sorted by expert.
    numbers: (rows,), the experts' indices.
    ends: (experts,) int32, the end of each expert's rows, exclusive.
    """
    stack = getattr(experts, name)
    matrices = stack if experts.is_transposed else stack.transpose(1, 2)
    x = x.to(stack.dtype)
    y = grouped_product(x, matrices, ends)
    if name in factors:
        a, b = _combined(factors[name], matrices)
        y.add_(grouped_product(grouped_product(x, a, ends), b, ends))
    if experts.has_bias:
        y.add_(getattr(experts, f"{name}_bias")[numbers])
    return y


def _combined(factors: Factors, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return Aᵀ and (s B)ᵀ of all experts, (E, K, r) and (E, r, N), with all adapters combined.

    r is the sum of the adapters' ranks, padded with zeros to the alignment that torch's kernel requires.

    matrices: (E, K, N), the experts' own matrices.
    """
    count, dtype = len(matrices), matrices.dtype
    all_a = [a.view(count, -1, a.shape[1]) for a, _, _ in factors]
    all_b = [(b * scaling).view(len(b), -1, count).permute(2, 1, 0) for _, b, scaling in factors]
    a, b = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in (all_a, all_b))
    more = -a.shape[1] % (_ALIGNMENT // matrices.itemsize)
    a, b = (torch.nn.functional.pad(each, (0, 0, 0, more)) if more else each for each in (a, b))
    return a.to(dtype).transpose(1, 2), b.to(dtype).contiguous()


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its group.

    Args:
        x: (rows, K), sorted by group.
        matrices: (groups, K, N), in the dtype of x.
        ends: (groups,) int32, the end of each group's rows, exclusive; the last element is `rows`.

    Returns:
        (rows, N).
    """
    # Compiled code does not call torch's kernel directly: Inductor may give its operands strides that it refuses.
    if not torch.compiler.is_compiling() and _has_kernel(matrices):
        return _KERNEL(x, matrices, offs=ends)
    return _product_of_groups(x, matrices, ends)


def _has_kernel(stack: Tensor) -> bool:
    """Return whether torch has a grouped product with `stack` (groups, rows, columns) on the stack's device."""
    if _KERNEL is None or stack.dtype not in _KERNEL_DTYPES:
        return False
    if any(width * stack.itemsize % _ALIGNMENT for width in stack.shape[1:]):
        return False
    if stack.device.type == "cuda":
        return torch.cuda.get_device_capability(stack.device) >= (8, 0)
    return stack.is_meta or torch.__version__ >= "2.11"


@torch.library.custom_op(
    "hf_bmtrain::product_of_groups", mutates_args=(), schema="(Tensor x, Tensor matrices, Tensor ends) -> Tensor"
)
def _product_of_groups(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_product` for any dtype and device. Without torch's kernel, the host waits for the device."""
    if _has_kernel(matrices):
        return _KERNEL(x.contiguous(), matrices, offs=ends)
    y = x.new_empty(len(x), matrices.shape[2])
    for group, rows in _groups(ends):
        torch.mm(x[rows], matrices[group], out=y[rows])
    return y


@torch.library.custom_op(
    "hf_bmtrain::gradient_of_groups", mutates_args=(), schema="(Tensor x, Tensor dy, Tensor ends) -> Tensor"
)
def _gradient_of_groups(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of `matrices` in `grouped_product`, (groups, K, N); it is zero for a group without rows."""
    matrices = x.new_zeros(len(ends), x.shape[1], dy.shape[1])
    if _has_kernel(matrices):
        return _KERNEL(x.contiguous().t(), dy.contiguous(), offs=ends)
    for group, rows in _groups(ends):
        torch.mm(x[rows].t(), dy[rows], out=matrices[group])
    return matrices


@_product_of_groups.register_fake
def _(x, matrices, ends):
    return x.new_empty(x.shape[0], matrices.shape[2])


@_gradient_of_groups.register_fake
def _(x, dy, ends):
    return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, matrices, ends = ctx.saved_tensors
    dx = grouped_product(dy, matrices.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return dx, _gradient_of_groups(x, dy, ends) if ctx.needs_input_grad[1] else None, None


_product_of_groups.register_autograd(_backward, setup_context=_keep)


def _groups(ends: Tensor) -> Iterable[tuple[int, slice]]:
    """Yield the index and the rows of each group that has rows."""
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            yield group, slice(begin, end)
        begin = end


class Spread(torch.autograd.Function):
    """Repeats each row of x for its k experts, in the given order: x[order // k].

    The gradient adds a row's k gradients in the order of its experts. The backward of torch's indexing would sort
    first.
    """

    @staticmethod
    def forward(ctx, x, order, k: int):
        ctx.save_for_backward(order)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        (order,) = ctx.saved_tensors
        rows = torch.empty_like(dy).index_copy_(0, order, dy)
        return rows.view(-1, ctx.k, dy.shape[1]).sum(1), None, None
