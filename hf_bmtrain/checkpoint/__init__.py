"""Save and load checkpoints of sharded models and optimizers, and verify, inspect and merge saved checkpoints.

With `save_state` and `load_state`, each rank writes and reads only the bytes of its own elements, in safetensors files.
`save` and `load` use one file of full tensors, and `DCPState` uses torch.distributed.checkpoint. The files in this
folder do not import transformers, accelerate, or the code that runs the sharded layers (`engine/blocks`).
"""
