"""Checkpoints of everything that training needs, as byte ranges of safetensors files.

Knows files, folders and which bytes of a full tensor this rank holds; must not know layers or Hugging Face's packages.
"""
