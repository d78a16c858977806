"""Statistics about the routers of mixtures of experts: the tokens of each expert, and the auxiliary loss.

Counting does not change training. A callback of Trainer starts it, and reads the counts for each entry of the log.
"""

from .load import RouterLoad

__all__ = ["RouterLoad"]
