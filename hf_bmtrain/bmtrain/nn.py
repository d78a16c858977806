"""The layers of BMTrain's module `nn`: a sharded `Linear`, and layers that are split by tensor parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..engine.base.arguments import expect_flag, expect_kind, expect_number
from ..engine.blocks.distributed_module import DistributedModule, ParameterInitializer
from ..engine.sharding.parameter import DistributedParameter
from ..features.loss.parallel import parallel_cross_entropy_func
from ..features.tensor_parallel.layers import (
    ColumnParallelLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
)

__all__ = [
    "ColumnParallelLinear", "Linear", "OpLinear", "OpParallelLinear", "ReduceType", "RowParallelLinear", "VPEmbedding",
    "parallel_cross_entropy_func",
]  # fmt: skip


class Linear(DistributedModule):
    """Linear layer y = x Aᵀ + b like torch.nn.Linear, from x (..., in_features) to y (..., out_features).

    `weight` (out_features, in_features) and `bias` (out_features,) are DistributedParameters, which are sharded over
    the ranks. So every rank must create the layer and call its forward. Weight and bias are zero until they are loaded,
    or until `init_parameters` draws the weight from the Glorot normal distribution.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the size of the last dimension of the output.
        bias: whether the layer has a bias.
        dtype: a floating-point dtype; None for torch's default dtype.

    Raises:
        ValueError: a size is not positive, or `dtype` is not a floating-point dtype.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            wanted = "at least 1 and below 2**48"
            expect_number(name, size, wanted, lambda size: 1 <= size < 2**48, integer=True)
        expect_flag("bias", bias)
        if dtype is not None:
            expect_kind("dtype", dtype, torch.dtype, "a floating torch.dtype or None")
            if not dtype.is_floating_point:
                raise ValueError(f"dtype must be a floating torch.dtype or None, got {dtype}")
        self.in_features, self.out_features = in_features, out_features
        self.weight = DistributedParameter(
            torch.zeros(out_features, in_features, dtype=dtype),
            init_method=ParameterInitializer(torch.nn.init.xavier_normal_),
        )
        zeros = ParameterInitializer(torch.nn.init.zeros_)
        self.bias = DistributedParameter(torch.zeros(out_features, dtype=dtype), init_method=zeros) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class OpLinear:
    """`torch.nn.functional.linear` as `OpLinear.apply(x, weight, bias)`, for scripts that use BMTrain's OpLinear."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute x weightᵀ + bias. Differentiable.

        Args:
            x: (..., in_features).
            weight: (out_features, in_features).
            bias: (out_features,), or None.

        Returns:
            (..., out_features).
        """
        return F.linear(x, weight, bias)
