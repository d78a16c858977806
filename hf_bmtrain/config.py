"""Properties of this process's world under BMTrain's keys, such as `bmt.config["rank"]`."""

from .bmtrain.config import config

__all__ = ["config"]
