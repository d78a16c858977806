"""Modules that gather their parameters, compute, and reduce their gradients.

They extend the classes of users' modules in place. They know buffers, slots, the schedule and the recomputation policy,
and nothing of models, optimizers or Hugging Face.
"""
