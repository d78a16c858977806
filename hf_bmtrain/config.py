"""`bmt.config`: a read-only mapping with this process's rank, world size, device and settings, under BMTrain's keys."""

from .bmtrain.config import config

__all__ = ["config"]
