"""Save and load checkpoints in safetensors files; each rank writes and reads only the byte ranges of its own elements.

This package knows files, folders, and which bytes of a full tensor belong to this rank. It knows neither layers nor
Hugging Face's packages.
"""
