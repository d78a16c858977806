"""`bmt.config`: the rank, world size and other properties of this process under BMTrain's keys."""

from .bmtrain.config import config

__all__ = ["config"]
