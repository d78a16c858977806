"""Of the LoRA recipe: prompts with completions, the embedded base model, the command line."""
