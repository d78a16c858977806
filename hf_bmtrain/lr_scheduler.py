"""Learning-rate schedules under BMTrain's names."""

from .bmtrain.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]
