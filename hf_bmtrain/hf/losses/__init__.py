"""Corrections that make Trainer's loss with several ranks and gradient accumulation equal that of one process.

`mean`: losses that are a mean over a rank's labels. `router`: auxiliary losses of routers. `short_batch`: the loss of
an evaluation's last batch, which Accelerate fills up with repeated rows. `hooks`: the hook that corrects a loss.
"""
