"""Save and load checkpoints of sharded models and optimizers, and verify, inspect and merge saved checkpoints.

With `save_state` and `load_state`, each rank writes and reads only its own elements of sharded tensors, in safetensors
files. `save` writes one file of full tensors, which `load` reads. `DCPState` uses torch.distributed.checkpoint. The
files in this folder do not import transformers, accelerate, or the code that runs the sharded layers (`engine/blocks`).
"""
