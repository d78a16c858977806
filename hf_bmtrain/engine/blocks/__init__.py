"""Modules that all-gather their parameters, compute, and reduce their gradients.

They extend the classes of users' modules in place. This package knows buffers, entries of modules' parameters, the
schedule and the recomputation policy. It knows neither models nor optimizers nor Hugging Face.
"""
