"""Optimizers over shards, and the end of a training step.

This package knows shards, flat buffers, gradients and communicators, but not modules, blocks or Hugging Face.
"""
