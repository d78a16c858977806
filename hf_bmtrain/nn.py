"""Layers under BMTrain's names."""

from .bmtrain.nn import ColumnParallelLinear, Linear, OpLinear, RowParallelLinear, VPEmbedding

__all__ = ["ColumnParallelLinear", "Linear", "OpLinear", "RowParallelLinear", "VPEmbedding"]
