"""Optimizers for sharded parameters, and the end of a training step: clipping, loss scaling, skipped steps.

This package uses shards, flat buffers, gradients and communicators. It does not depend on modules, blocks or Hugging
Face.
"""
