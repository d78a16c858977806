"""PEFT's LoRA layers, with the adapter added in the matrix product of the frozen layer."""
