"""Predict the memory that a training step needs from a model's `config.json`: `python -m hf_bmtrain.memory CONFIG`."""

if __name__ == "__main__":
    from .hf.predict_cli import main

    main()
