"""Statistics about the routers of mixtures of experts: the tokens of each expert, and the auxiliary loss.

They do not change training. A callback of Trainer starts the counting, and reads the counts for each entry of the log.
"""

from .load import RouterLoad

__all__ = ["RouterLoad"]
