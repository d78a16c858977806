"""Activation checkpointing: the choice of forwards that are repeated in backward, and their repetition.

This folder measures the memory of a block's forward and restores the state that the forward changes. Parameters and
gradients are not its concern: `blocks` calls it once per training forward.

* *recompute*: run a block's forward again in backward instead of keeping its activations.
* *snapshot*: the buffers and caches at the beginning of a forward, by which it can be repeated.
* *pass*: from the end of one backward to the end of the next.
* *plan*: the blocks that keep their activations, and those that stay whole until their backward.
"""
