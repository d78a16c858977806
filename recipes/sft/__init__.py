"""Of the recipes `lora.py` and `moe.py`: prompts with completions, embedded base models, the training."""
