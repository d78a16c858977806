"""Corrections that make a model's loss under Trainer equal that of one process, with several ranks and accumulation.

`mean`: losses that are a mean over a rank's labels. `router`: auxiliary losses of routers. `short_batch`: the loss of
an evaluation's last batch, which Accelerate fills up with repeated rows. `hooks`: the hook that corrects a loss.
"""
