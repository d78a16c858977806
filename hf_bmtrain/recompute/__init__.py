"""Activation checkpointing: which forwards of a block are repeated in backward, and how.

It knows what a block's forward takes in memory and which state the forward changes. It knows nothing of how parameters
are gathered and gradients reduced: `blocks` asks it once per training forward and does the rest.

* *recompute*: run a block's forward again in backward instead of keeping its activations.
* *snapshot*: the buffers and caches that a forward began from, so that it can be repeated.
* *pass*: from the end of one backward to the end of the next.
* *plan*: the blocks that keep their activations, and those that stay whole until their backward.
"""
