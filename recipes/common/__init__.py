"""Shared by all recipes: the command line, the curve of a run, and the Hugging Face Hub."""
