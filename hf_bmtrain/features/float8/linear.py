"""Float8Linear: a linear layer in a block, whose three matrix products are computed in float8.

The forward computes y = x Wᵀ from x quantized by rows (with one scale per row). The backward computes dx = dy W from dy
quantized by rows, and dW = dyᵀ x from dy and x quantized by columns (see `arithmetic`). If W requires a gradient,
autograd saves x quantized by columns (8 bits per element) instead of x. The weight W is either a full parameter in its
own dtype, which is quantized at each use, or it has been all-gathered in float8 (`Float8Storage`). The bias is added in
the dtype of the activations.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...engine.base.launch import C_NAMES
from ...engine.base.torch_internals import autocast_type
from ...engine.blocks.sharded_module import extend_module
from ...engine.tensors.backward import double_backward
from .arithmetic import Float8, product, quantize_both, quantize_full, quantize_rows, quantize_transposed
from .storage import Float8Storage, GatheredFactor

_CHUNK = 1024
"""`_powers` measures the rounding noise of a layer's output in chunks of this many rows. This limits the memory for the
exact output, with which the layer's output is compared."""


class Float8Inputs:
    """Caches a quantized input for layers that get the same input, such as the query, key and value projections.

    The cache has one entry. The entry is dropped when the input tensor is freed, and replaced when a layer gets a
    different input.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._state: tuple[torch.dtype, int] | None = None
        self._factors: tuple[Float8, Float8 | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Inputs:
        return Float8Inputs()

    def factors(self, x: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor | None, ...]:
        """Quantize x to float8 with one scale per row and, if `both`, also with one scale per column.

        If the preceding call had the same tensor x and the same dtype, and x was not modified in between, the result
        may come from the cache.

        Args:
            x: the input of a layer, (..., K). It is flattened to (M, K).
            dtype: the dtype to which x is converted before it is quantized.
            both: whether to quantize x with one scale per column too, as the gradient of the layer's weight needs it.

        Returns:
            Four tensors. The first two are the values (M, K) and scales (M, 1) of x with one scale per row. The last
            two are the values (K, M') and scales (K, 1) of the transpose of x, with one scale per column of x. M' is M
            rounded up to a multiple of 16 (see `quantize_both`). The last two are None if `both` is False.
        """
        # In compiled code no cache is needed, because torch.compile removes repeated computations. The code below could
        # not be compiled either, because torch.compile cannot trace `_is_view`.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _flattened(*_round(x, dtype, both))
        # Two kinds of inputs are not cached, because the version counter does not show that their values have changed:
        # tensors of torch.inference_mode have no counter, and the counter of a full parameter stays the same when the
        # parameter is all-gathered again.
        owner = x._base if x._is_view() else x
        if x.is_inference() or isinstance(owner, torch.nn.Parameter):
            return _flattened(*_round(x, dtype, both))
        state, last = (dtype, x._version), self._last
        known = self._factors if last is not None and last() is x and self._state == state else None
        if known is None or (both and known[1] is None):
            known = self._factors = _round(x, dtype, both)
            self._state, self._last = state, weakref.ref(x, self._forget)
        return _flattened(known[0], known[1] if both else None)

    def _forget(self, dead: weakref.ref[Tensor]) -> None:
        if dead is self._last:
            self._last = self._state = self._factors = None


@dataclass(eq=False)
class Float8State:
    """The state of one Float8Linear, a linear layer that computes in float8.

    In the first training step, or just before it, the layer's rounding noise is measured. The ranks then decide
    together whether the layer continues to compute in float8, and whether its weight is all-gathered in float8, too.

    Attributes:
        transposed: whether the layer's weight has the shape (inputs, outputs), as in transformers' Conv1D, instead of
            (outputs, inputs).
        inputs: the cache of quantized inputs, shared with the model's other float8 layers.
        active: whether the layer computes in float8.
        guard: a weak reference to the Calibration, the observer that measures the noise and decides about the layer;
            None after the decision.
        reason: why this layer prevents its weight, and so the weight's whole flat buffer, from being all-gathered in
            float8; None if the layer does not prevent this, and before the decision.
        measures: whether the next forward measures rounding noise and sets `powers`.
        powers: (2,) float32, the sum of squares of the output without rounding, and the sum of squares of the error
            that rounding causes; None before the measurement.
        storage: the Float8Storage, which stores the weight's shard and may all-gather it in float8; None if the weight
            is stored in another way.
        index: the weight's index in the flat buffer of `storage`.
    """

    transposed: bool
    inputs: Float8Inputs
    active: bool = True
    guard: weakref.ref[Any] | None = None
    reason: str | None = None
    measures: bool = False
    powers: Tensor | None = None
    storage: Float8Storage | None = None
    index: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8State:
        """Return the state for a copy of the layer in a deep copy of the model.

        The copy has full weights, so its state refers to nothing of the sharded model. Only the layer's settings are
        copied.
        """
        return Float8State(self.transposed, copy.deepcopy(self.inputs, memo), self.active)

    def gathered(self, weight: Tensor) -> GatheredFactor | None:
        """Return the layer's weight as it was all-gathered in float8, or None if the layer must quantize `weight`.

        The result is None in two cases:

        * The weight is not all-gathered in float8.
        * `weight` is not the layer's full parameter but another tensor that has taken its place, for example in
          torch.func.functional_call. The all-gathered values are not those of this tensor. (Compiled code does not
          check this: there, `weight` is always the full parameter.)

        weight: the tensor that the layer has as its `weight` in this forward.
        """
        storage = self.storage
        if storage is None or not storage.in_float8:
            return None
        # Compiled code skips the comparison, which would become part of the graph. It is not needed there, because in
        # compiled code `weight` is always the full parameter.
        shown = torch.compiler.is_compiling() or weight is storage.buffer.full_params[self.index]
        return storage.factors[self.index] if shown else None


class Float8Linear(torch.nn.Module):
    """A linear layer that computes in float8. `extend_linear` turns an existing layer into one, by changing its class.

    Attributes:
        float8_state: the layer's settings and measurements.
        weight: (outputs, inputs) or, if `float8_state.transposed`, (inputs, outputs).
        bias: (outputs,), or None.
    """

    float8_state: Float8State
    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        state, dtype = self.float8_state, _dtype_of(input)
        if not state.active or dtype not in C_NAMES:
            return super().forward(input)
        factors = state.inputs.factors(input, dtype, self.weight.requires_grad and torch.is_grad_enabled())
        flat = input.to(dtype).reshape(-1, input.shape[-1])
        gathered = state.gathered(self.weight) or (None, None, None)
        y: Any = _Product.apply(flat, self.weight, *factors, *gathered, state.transposed)
        if state.measures:
            state.measures, state.powers = False, _powers(flat, self.weight, y, state.transposed)
        y = y.view(*input.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(dtype)


def extend_linear(layer: torch.nn.Module, transposed: bool, inputs: Float8Inputs) -> Float8State:
    """Make `layer` a Float8Linear in place. Return its Float8State, which says whether and how it computes in float8.

    Args:
        layer: a linear layer.
        transposed: whether the layer's weight is (inputs, outputs), as in transformers' Conv1D.
        inputs: the cache of quantized inputs that the model's float8 layers share.
    """
    state = layer.float8_state = Float8State(transposed, inputs)  # pyright: ignore[reportArgumentType]
    extend_module(layer, Float8Linear)
    return state


@torch.no_grad()
def _round(x: Tensor, dtype: torch.dtype, both: bool) -> tuple[Float8, Float8 | None]:
    """Convert x, (..., K), to `dtype`, flatten it to (M, K), and quantize it by rows and, if `both`, by columns."""
    flat = x.detach().to(dtype).reshape(-1, x.shape[-1]).contiguous()
    return quantize_both(flat) if both else (quantize_rows(flat), None)


def _flattened(rows: Float8, columns: Float8 | None) -> tuple[Tensor | None, ...]:
    return *rows, *(columns or (None, None))


def _dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes with input x: the autocast dtype if enabled, else that of x."""
    kind = autocast_type(x.device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, rows, row_scales, columns, column_scales, values, of_rows, of_columns, transposed: bool
    ):
        """Return x Wᵀ in the dtype of x. Only the dtype of x is used; its values are passed in quantized form.

        x: (M, K).
        weight: W, (N, K), or (K, N) if `transposed`.
        rows, row_scales: x quantized with one scale per row.
        columns, column_scales: x quantized with one scale per column; None if the weight needs no gradient.
        values, of_rows, of_columns: the weight's values, row scales and column scales as they were all-gathered in
            float8 (the fields of a GatheredFactor). If they are None, `weight` is quantized here.
        """
        ctx.transposed, ctx.dtype, ctx.weight_dtype = transposed, x.dtype, weight.dtype
        weight = (weight,) if values is None else (values, of_rows, of_columns)
        ctx.save_for_backward(columns, column_scales, *weight)
        return product(Float8(rows, row_scales), _factor(weight, transposed), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise double_backward()
        columns, column_scales, *weight = ctx.saved_tensors
        dy, dw = dy.contiguous(), None
        if ctx.needs_input_grad[1]:
            rows, of_dy = quantize_both(dy)
            of_x = Float8(columns, column_scales)
            pair = (of_x, of_dy) if ctx.transposed else (of_dy, of_x)
            dw = product(*pair, ctx.weight_dtype, fast=False)
        else:
            rows = quantize_rows(dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, _factor(weight, not ctx.transposed), ctx.dtype, fast=False)
        return dx, dw, *[None] * 8


def _factor(weight: Sequence[Tensor], turned: bool) -> Float8:
    """Return a weight as an operand of a float8 matrix product (`product`), with one scale per row.

    weight: a sequence of one tensor, the full weight in its own dtype; or, if the weight was all-gathered in float8, a
        sequence of three tensors, the fields of its GatheredFactor.
    turned: whether to return the weight's transpose instead.
    """
    if len(weight) > 1:
        return GatheredFactor(*weight).factor(turned)
    return quantize_transposed(weight[0]) if turned else quantize_full(weight[0])


@torch.no_grad()
def _powers(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> Tensor:
    """Measure a layer's rounding noise: return (2,), the sums of squares of its exact output and of the error in y.

    The exact output, without quantization, is computed here in the dtype of x.

    x: (M, K), the input.
    weight: (N, K), or (K, N) if `transposed`.
    y: (M, N), the layer's float8 output, without the bias.
    """
    weight = (weight.t() if transposed else weight).to(x.dtype)
    powers = torch.zeros(2, dtype=torch.float32, device=x.device)
    for some, rounded in zip(x.split(_CHUNK), y.split(_CHUNK)):
        exact = linear(some, weight).float()
        powers += torch.stack([exact.square().sum(), (rounded.float() - exact).square().sum()])
    return powers
