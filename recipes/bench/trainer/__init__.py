"""The benchmark of Hugging Face's stock Trainer: what to measure, one process of one cell, the command, the table."""
