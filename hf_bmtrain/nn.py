"""Linear, embedding and tensor-parallel layers, under BMTrain's names."""

from .bmtrain.nn import (
    ColumnParallelLinear,
    Linear,
    OpLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
    parallel_cross_entropy_func,
)

__all__ = [
    "ColumnParallelLinear", "Linear", "OpLinear", "OpParallelLinear", "ReduceType", "RowParallelLinear", "VPEmbedding",
    "parallel_cross_entropy_func",
]  # fmt: skip
