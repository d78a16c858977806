"""What the recipes `lora.py` and `moe.py` share: examples, small base models, options and training."""
