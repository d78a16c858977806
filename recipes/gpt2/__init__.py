"""The GPT that train_gpt2.py trains: layers, model, data, report."""
