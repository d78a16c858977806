"""Activation checkpointing: which forwards of a block are recomputed in backward, and how.

It knows the memory that a block's forward takes and the state that the forward changes. It knows nothing of how
parameters are gathered and gradients reduced: `blocks` asks it once per training forward and does the rest.

* *recompute*: run a block's forward again in backward instead of keeping its activations.
* *policy*: what decides whether a block's forward is recomputed: True, False or a plan.
* *replay*: run a forward again from its snapshot, without changing state twice.
* *snapshot*: the buffers and caches that a forward began from.
* *pass*: from the end of one backward to the end of the next.
* *plan*: the blocks that keep their activations, and those that stay whole until their backward.
"""
