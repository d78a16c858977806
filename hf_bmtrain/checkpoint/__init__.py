"""Save and load checkpoints in safetensors files; each rank writes and reads only the bytes of its own elements.

The code in this folder handles files, folders and byte ranges. It does not import transformers or accelerate, nor the
code that runs the sharded layers.
"""
