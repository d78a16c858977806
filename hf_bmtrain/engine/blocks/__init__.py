"""Modules that all-gather their parameters before they compute, and reduce their gradients in backward.

A user's module becomes such a module in place: its class is replaced by a subclass. This package also decides when
parameters are unsharded and resharded, and provides interfaces for features that decide which forwards are recomputed
in backward. It does not depend on particular models, on optimizers or on Hugging Face.
"""
