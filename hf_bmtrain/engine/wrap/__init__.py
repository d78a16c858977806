"""Automatic sharding of a model: check it, find its blocks, shard it, patch it.

This package relies only on the structure of models: ModuleLists, parameters, and methods that Hugging Face models may
have. It imports neither Hugging Face libraries nor optimizers.
"""
