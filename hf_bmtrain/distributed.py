"""Differentiable collectives, such as the mean of a loss (`sum_loss`), and `gather_result`, under BMTrain's names."""

from .bmtrain.distributed import all_gather, all_reduce, broadcast, gather_result, reduce_scatter, sum_loss

__all__ = ["all_gather", "all_reduce", "broadcast", "gather_result", "reduce_scatter", "sum_loss"]
