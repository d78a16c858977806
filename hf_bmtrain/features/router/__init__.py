"""What the routers of a mixture of experts do: how many tokens each expert gets, and the auxiliary loss.

It changes nothing in training. Trainer's callback starts it, and reads it for each entry of the log.
"""

from .load import RouterLoad

__all__ = ["RouterLoad"]
