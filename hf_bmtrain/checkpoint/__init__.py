"""Checkpoints of all that training needs, as byte ranges of safetensors files.

Knows files, folders and which bytes of a whole tensor this rank holds; must not know layers, Hugging Face's packages.
"""
