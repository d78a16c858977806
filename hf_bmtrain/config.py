"""The world by BMTrain's keys: `bmt.config["rank"]`."""

from .bmtrain.config import config

__all__ = ["config"]
