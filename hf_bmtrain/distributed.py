"""BMTrain's differentiable collectives, `sum_loss` (which returns the mean of a loss), and `gather_result`."""

from .bmtrain.distributed import all_gather, all_reduce, broadcast, gather_result, reduce_scatter, sum_loss

__all__ = ["all_gather", "all_reduce", "broadcast", "gather_result", "reduce_scatter", "sum_loss"]
