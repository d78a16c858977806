"""Optimizers over shards, and the end of a training step.

It knows shards, flat buffers, gradients and communicators, and nothing of modules, blocks or Hugging Face.
"""
