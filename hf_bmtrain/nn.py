"""Layers by BMTrain's names."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .blocks.module import DistributedModule, ParameterInitializer
from .runtime.parallelism import ColumnParallelLinear, RowParallelLinear, VPEmbedding, parallel_cross_entropy_func
from .sharding.buffer import DistributedParameter

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear", "VPEmbedding", "parallel_cross_entropy_func"]


class Linear(DistributedModule):
    """y = x Aᵀ + b, as torch.nn.Linear: x (..., in_features) to y (..., out_features).

    weight (out_features, in_features) and bias (out_features,) are DistributedParameters, zero until
    `init_parameters` (Glorot's normal distribution, and zero) or a load fills them. dtype: torch's default.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"Linear needs positive sizes, got {in_features} and {out_features}")
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
