"""Activation checkpointing: which forwards of a block are recomputed in backward, and how.

It knows the memory that a block's forward takes and the state that the forward changes. It knows nothing of how
parameters are gathered and gradients reduced: `blocks` asks it once per training forward and does the rest.
"""
