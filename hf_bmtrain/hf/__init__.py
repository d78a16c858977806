"""The boundary to Hugging Face's transformers and accelerate."""
