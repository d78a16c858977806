"""Save and load checkpoints in safetensors files; each rank writes and reads only the byte ranges of its own elements.

This package knows files, folders, and which bytes of a full tensor this rank has. It must not know layers or Hugging
Face's packages.
"""
