"""Automatic sharding of a model: check it, find its blocks, shard it, patch it.

This package knows models only by their structure: ModuleLists, parameters, and methods that Hugging Face models may
have. It imports no Hugging Face library and nothing of optimizers.
"""
