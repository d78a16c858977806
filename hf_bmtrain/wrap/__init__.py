"""Automatic sharding of a model: find its blocks, check it, shard it, patch it.

It knows models by their structure alone: ModuleLists, parameters, and methods that Hugging Face models may have. It
imports no Hugging Face library and knows nothing of optimizers.

* *chain*: blocks in the order in which they are expected to run.
* *shared*: used by two blocks, or by a block and a module outside; sharded outside.
* *guard*: the check of a wrapped model before each training forward.
"""
