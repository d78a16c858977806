"""Modules that all-gather their parameters, compute, and reduce their gradients.

They extend the classes of users' modules in place. This package knows buffers, slots, the schedule and the
recomputation policy, but not models, optimizers or Hugging Face.
"""
