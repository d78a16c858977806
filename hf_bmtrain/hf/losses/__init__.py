"""Corrections that make Trainer's loss with several ranks and gradient accumulation equal that of one process.

`mean`: losses that are a mean over a rank's labels. `router`: auxiliary losses of routers. `short_batch` and
`short_training_batch`: the loss of the last batch of an evaluation or an epoch, which Accelerate fills up with repeated
rows. `hooks`: hooks that correct a model's loss. `count_use`: observes whether a loss uses the number of labels.
"""
