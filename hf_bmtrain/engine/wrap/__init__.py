"""Automatic sharding of a model: find its blocks, check it, shard it, patch it.

It knows models by their structure alone: ModuleLists, parameters, and methods that Hugging Face models may have. It
imports no Hugging Face library and knows nothing of optimizers.
"""
