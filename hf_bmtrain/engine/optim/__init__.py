"""Optimizers over shards, and the end of a training step.

This package knows shards, flat buffers, gradients and communicators. It knows neither modules nor blocks nor Hugging
Face.
"""
