"""Save and load checkpoints in safetensors files; each rank writes and reads only the byte ranges of its own elements.

This package handles files, folders, and the byte ranges of each rank's elements. It does not depend on layers or on
Hugging Face's packages.
"""
