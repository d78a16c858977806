"""The forward of mixtures of experts: sort rows by expert, compute grouped products, restore the order of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...engine.base.torch_internals import functorch_transforms_active, has_global_hooks, has_hooks
from ...engine.blocks.sharded_module import OnlyWhileSharded, extend_module
from ...engine.tensors.backward import double_backward
from .arithmetic import serves, silu_gate, silu_gate_backward, sum_rows, sum_rows_backward
from .products import ALIGNMENT, gradient_of_groups, grouped_product, has_kernel

FACTORS = "lora_factors"
"""The name of the keyword argument by which `SortedExperts.forward` gets LoRA adapters: {name of a weight: Factors}."""
_SETTINGS = ("down_proj", "has_gate", "has_bias", "is_transposed", "num_experts", "config")
_MODULE = "transformers.integrations.moe"
"""The module that defines the forward of every class of experts that can run with grouped_mm."""
_GATE = (_MODULE, "_default_apply_gate")
_SILU = (("torch.nn.modules.activation", "SiLU"), ("transformers.activations", "SiLUActivation"))

Factors = list[tuple[Tensor, Tensor, float]]
"""(A, B, scaling) of each active LoRA adapter of one stack, a 3-D weight with one matrix per expert.

For E experts and rank r, A is (E r, K) and B is (N, r E), as in PEFT. The expert is the slowest index of the rows of A,
and the fastest index of the columns of B."""


class SortedExperts(OnlyWhileSharded):
    """Base class for mixture-of-experts modules, with a forward that is faster than that of transformers.

    `sort_experts` gives an existing module this forward: it replaces the module's class by a subclass of SortedExperts
    and of the module's own class.

    The forward runs `run_experts` instead of transformers' code in two cases: if LoRA adapters of the module's weights
    are passed as the keyword argument `lora_factors`, or if gradients are enabled and transformers would run its
    implementation "grouped_mm" (`_replaces` checks all conditions).
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        factors = kwargs.pop(FACTORS, None)
        if factors is None and not _replaces(self):
            return super().forward(*args, **kwargs)
        return run_experts(self, factors or {}, *args, **kwargs)


def can_sort(experts: Any) -> bool:
    """Return whether `run_experts` can replace the forward of `experts`, a module of any class.

    It can if the module contains several experts and its forward is the one defined in the transformers library, which
    supports the "grouped_mm" implementation. It cannot if the module's class overrides this forward, or if the user has
    registered a different function as "grouped_mm" in transformers.
    """
    if not hasattr(experts, "_apply_gate") or not all(hasattr(experts, setting) for setting in _SETTINGS):
        return False
    cls: Any = type(experts)
    while hasattr(cls, "_extends"):
        cls = cls._extends
    names = getattr(cls.forward, "__globals__", {})
    if names.get("__name__") != _MODULE or experts.num_experts < 2:
        return False
    return names["ALL_EXPERTS_FUNCTIONS"]["grouped_mm"] is names["grouped_mm_experts_forward"]


def sort_experts(modules: Iterable[torch.nn.Module]) -> int:
    """Give each mixture of experts in `modules` the faster forward of SortedExperts. Return how many were changed.

    A module is changed in place: its class becomes a subclass of SortedExperts. Modules that transformers cannot run
    with its "grouped_mm" implementation of experts are left alone.
    """
    found = [module for module in modules if can_sort(module) and not isinstance(module, SortedExperts)]
    for module in found:
        extend_module(module, SortedExperts)
    return len(found)


def _replaces(experts: Any) -> bool:
    """Return whether `run_experts` replaces transformers' own code in the current forward of the module `experts`.

    It does if all these conditions are met:

    * Gradients are enabled, and transformers is set to its implementation "grouped_mm".
    * The experts are not divided by expert parallelism, and the module's `forward` has not been replaced.
    * `down_proj` is 3-D, and torch's grouped_mm kernel can multiply by it (`has_kernel`).
    * No torch.func transform is active, or the code is being compiled.
    """
    if not torch.is_grad_enabled() or experts.config._experts_implementation != "grouped_mm":
        return False
    if getattr(experts, "_is_expert_parallel", False) or "forward" in vars(experts):
        return False
    stack = experts.down_proj
    if stack.dim() != 3 or not has_kernel(stack):
        return False
    return torch.compiler.is_compiling() or not functorch_transforms_active()


def run_experts(
    experts: Any, factors: dict[str, Factors], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the forward of `experts`, a mixture-of-experts module from transformers, with or without LoRA adapters.

    `SortedExperts.forward` calls this instead of transformers' forward, in the cases that the class documents.

    Each token is copied into k rows, one for each of its experts. The rows are sorted by expert, so that one grouped
    matrix product multiplies all rows by a weight (a stack with one matrix per expert). Adapters have grouped products
    of their own; they are not merged into the weights.

    Args:
        experts: the module. Its weights must be unsharded.
        factors: for each weight with LoRA adapters, such as "down_proj", the list of its adapters: {name of the weight:
            [(A, B, scaling), ...]}. Pass {} if there are no adapters.
        hidden_states: (tokens, width).
        top_k_index: (tokens, k), the indices of each token's experts.
        top_k_weights: (tokens, k), the router's weights for the outputs of these experts.

    Returns:
        (tokens, width), in the dtype of `hidden_states`.
    """
    tokens, k = top_k_index.shape
    # A GPU sorts by 8 bits of the keys at a time, so short keys save passes over the memory.
    numbers, order = top_k_index.reshape(-1).to(torch.uint8 if experts.num_experts <= 256 else torch.int32).sort()
    every = torch.arange(experts.num_experts, device=numbers.device, dtype=numbers.dtype)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    grouped = functools.partial(_product, experts, factors, numbers, ends)
    rows = Spread.apply(hidden_states, order, places, k)
    y = grouped("gate_up_proj" if experts.has_gate else "up_proj", rows)
    if not experts.has_gate:
        y = experts.act_fn(y)
    elif serves(y, 2) and _has_silu_gate(experts):
        y = SiluGate.apply(y)
    else:
        y = experts._apply_gate(y)
    y = grouped("down_proj", y)
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    return Combine.apply(y, top_k_weights.reshape(tokens, k), order, places).to(hidden_states.dtype)


def _product(experts: Any, factors: dict[str, Factors], numbers: Tensor, ends: Tensor, name: str, x: Tensor) -> Tensor:
    """Multiply each row of x by its expert's matrix in the weight `name`, and add adapters and bias.

    experts: the module of experts.
    factors: {name of a weight: its LoRA adapters}.
    numbers: (rows,), the index of each row's expert.
    ends: (experts,) int32, the end of each expert's rows, exclusive.
    x: (rows, K), sorted by expert.
    """
    stack = getattr(experts, name)
    matrices = stack if experts.is_transposed else stack.transpose(1, 2)
    x = x.to(stack.dtype)
    y = grouped_product(x, matrices, ends)
    if name in factors:
        a, b = _combined(factors[name], matrices)
        y.add_(grouped_product(grouped_product(x, a, ends), b, ends))
    if experts.has_bias:
        y.add_(Biases.apply(getattr(experts, f"{name}_bias"), numbers.int(), ends))
    return y


def _has_silu_gate(experts: Any) -> bool:
    """Return whether `experts` uses transformers' standard gate, silu(gate) * up, and no hooks apply to its SiLU."""
    gate = type(experts)._apply_gate
    if (gate.__module__, gate.__name__) != _GATE or "_apply_gate" in vars(experts):
        return False
    act = experts.act_fn
    cls = type(act)
    if (cls.__module__, cls.__name__) not in _SILU or cls.forward.__module__ != cls.__module__:
        return False
    return not ("forward" in vars(act) or has_global_hooks() or has_hooks(act))


def _combined(factors: Factors, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the LoRA adapters of one weight into a single adapter. Return its Aᵀ (E, K, r) and (s B)ᵀ (E, r, N).

    The rank r of the combined adapter is the sum of the adapters' ranks, increased to a multiple of the alignment that
    torch's grouped_mm kernel requires. The additional rows of A and columns of B are zeros.

    factors: (A, B, s) of each adapter; s is its scaling.
    matrices: (E, K, N), the adapted weight: one matrix for each of E experts.
    """
    count, dtype = len(matrices), matrices.dtype
    all_a = [a.view(count, -1, a.shape[1]) for a, _, _ in factors]
    all_b = [(b * scaling).view(len(b), -1, count).permute(2, 1, 0) for _, b, scaling in factors]
    a, b = (each[0] if len(each) == 1 else torch.cat(each, 1) for each in (all_a, all_b))
    more = -a.shape[1] % (ALIGNMENT // matrices.itemsize)
    a, b = (torch.nn.functional.pad(each, (0, 0, 0, more)) if more else each for each in (a, b))
    return a.to(dtype).transpose(1, 2), b.to(dtype).contiguous()


class Spread(torch.autograd.Function):
    """Autograd function x[order // k]: copies the row of each token once for each of its k experts.

    The result is (tokens * k, width), sorted by expert.

    x: (tokens, width).
    order: (tokens * k,), the permutation that sorts the pairs (token, expert) by expert.
    places: the inverse of `order`. With it, backward finds the k rows of a token without the sort that the backward of
        torch's indexing needs.
    k: the number of experts of each token.
    """

    @staticmethod
    def forward(ctx, x, order, places, k: int):
        ctx.save_for_backward(places)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        (places,) = ctx.saved_tensors
        return _sum_of_each_token(dy, places.view(-1, ctx.k)), None, None, None


class Combine(torch.autograd.Function):
    """Autograd function that adds up the k rows of each token, multiplied by the router's weights.

    `Spread` copies each token into k rows, and the experts process these rows. This function then returns one row for
    each token, in the original order of tokens.

    y: (tokens * k, width), the outputs of the experts, sorted by expert.
    weights: (tokens, k), the router's weights of each token's experts.
    order: (tokens * k,), the permutation that sorts the pairs (token, expert) by expert.
    places: the inverse of `order`, by which the rows of a token are found. Each row of y is used exactly once, so this
        backward need not sort the rows, as the backward of torch's indexing would.
    """

    @staticmethod
    def forward(ctx, y, weights, order, places):
        ctx.save_for_backward(y, weights, order, places)
        return _sum_of_each_token(y, places.view(weights.shape), weights)

    @staticmethod
    def backward(ctx, dout):
        if torch.is_grad_enabled():
            raise double_backward()
        y, weights, order, places = ctx.saved_tensors
        if serves(y) and dout.dtype in (y.dtype, torch.float32):
            dy, dweights = sum_rows_backward(dout, y, weights, order)
            return dy, dweights if weights.dtype == dweights.dtype else dweights.to(weights.dtype), None, None
        rows = dout.index_select(0, order // weights.shape[1])
        dy = (rows * weights.reshape(-1, 1).index_select(0, order)).to(y.dtype)
        dweights = (rows * y).sum(1).to(weights.dtype).index_select(0, places).view(weights.shape)
        return dy, dweights, None, None


class SiluGate(torch.autograd.Function):
    """Autograd function silu(gate) * up (SwiGLU). In each row of x, the first half is gate, and the second half is up.

    x: (rows, 2 * width). The result has shape (rows, width).
    """

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return silu_gate(x)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        (x,) = ctx.saved_tensors
        return silu_gate_backward(x, dy)


def _sum_of_each_token(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return (tokens, width): the sum of each token's k rows.

    rows: (tokens * k, width).
    places: (tokens, k), the indices of each token's rows.
    weights: (tokens, k), by which the rows are multiplied before they are added; None for ones.
    """
    # If this package's kernel `sum_rows` supports the rows (`serves`), it computes the sum in two cases:
    # - without weights, which is the backward of `Spread`, also in compiled code. There, Inductor would fuse the sum
    #   with the reduction of a norm that follows it, and the fused kernel would read all rows twice.
    # - with weights, in a forward that is not compiled, unless the weights are float64, for which there is no kernel.
    #   The result has the dtype that torch's product and sum would give it: the promoted dtype of rows and weights, or
    #   float32 under autocast.
    # In a compiled forward, the sum is left to Inductor, which fuses it with what follows.
    if weights is None:
        if serves(rows):
            return sum_rows(rows, places)
    elif not torch.compiler.is_compiling() and weights.dtype != torch.float64 and serves(rows):
        promoted = torch.promote_types(rows.dtype, weights.dtype)
        return sum_rows(rows, places, weights, torch.float32 if torch.is_autocast_enabled("cuda") else promoted)
    if not torch.compiler.is_compiling():
        found = rows.index_select(0, places.view(-1)).view(*places.shape, rows.shape[1])
        return (found if weights is None else found * weights[..., None]).sum(1)
    # In compiled code, add the rows one after another instead of calling `sum(1)`. Inductor fuses these additions into
    # one kernel, whose threads read neighboring elements of a row. Inductor would compile `sum(1)` to a reduction whose
    # threads read different rows, which is several times slower.
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    wide = torch.promote_types(dtype, torch.float32)  # 16-bit elements are added in float32, as torch's sum does
    total = rows.new_zeros(len(places), rows.shape[1], dtype=wide)
    for number, column in enumerate(places.unbind(1)):
        found = rows.index_select(0, column).to(wide)
        total = total + (found if weights is None else found * weights[:, number, None].to(wide))
    # Do not call `to` if the dtype is right already: in compiled code, torch 2.11 would lose the gradient.
    return total if total.dtype == dtype else total.to(dtype)


class Biases(torch.autograd.Function):
    """Autograd function bias[numbers]: returns the bias of each row's expert, for rows that are sorted by expert.

    The backward sums the gradients of each expert's rows, as a grouped product with a matrix of ones.

    bias: (experts, width).
    numbers: (rows,), the index of each row's expert, ascending. Used by the forward.
    ends: (experts,) int32, the end of each expert's rows, exclusive. Used by the backward.
    """

    @staticmethod
    def forward(ctx, bias, numbers, ends):
        ctx.save_for_backward(ends)
        return bias.index_select(0, numbers)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        (ends,) = ctx.saved_tensors
        ones = dy.new_ones(len(dy), ALIGNMENT // dy.itemsize)
        return gradient_of_groups(ones, dy, ends)[:, 0], None, None
