"""Optimizers over shards, and the end of a training step.

This package uses shards, flat buffers, gradients and communicators. It does not depend on modules, blocks or Hugging
Face.
"""
