"""Layers by BMTrain's names."""

from ..parallelism import ColumnParallelLinear, RowParallelLinear, VPEmbedding, parallel_cross_entropy_func
from .linear import Linear

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear", "VPEmbedding", "parallel_cross_entropy_func"]
