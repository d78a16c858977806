"""Checkpoints, and exchange of Python objects between ranks, under BMTrain's names."""

from .bmtrain.store import DistributedStateDictWrapper, allgather_object, allgather_objects, broadcast_object
from .bmtrain.store import _save_to_rank0 as _save_to_rank0
from .checkpoint.store import load, save

__all__ = [
    "DistributedStateDictWrapper", "allgather_object", "allgather_objects", "broadcast_object", "load", "save",
]  # fmt: skip
