"""Modules that all-gather their sharded parameters before they compute, and reduce the gradients in backward.

A user's module becomes such a module in place: its class is replaced by a subclass. This folder also decides when
parameters are unsharded and resharded, and defines the interfaces through which features control the recomputation of
forwards in backward. It does not depend on particular models, on optimizers or on Hugging Face.
"""
