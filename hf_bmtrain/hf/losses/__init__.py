"""The losses of a model under Trainer: on several ranks, and with accumulation, they are those of one process.

`mean`: losses that are a mean over a rank's labels. `router`: auxiliary losses of routers. `short_batch`: the loss of
an evaluation's last batch, which Accelerate fills with repeated rows. `hooks`: the hook that corrects a loss.
"""
