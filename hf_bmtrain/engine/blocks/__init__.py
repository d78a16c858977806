"""Modules that all-gather their parameters, compute, and reduce their gradients.

They extend the classes of users' modules in place. This package uses flat buffers, slots (entries of modules'
parameters), the schedule and the recomputation policy. It does not depend on models, optimizers or Hugging Face.
"""
