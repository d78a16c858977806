"""Predict how much memory a training step needs, given a model's config.json: `python -m hf_bmtrain.memory CONFIG`."""

if __name__ == "__main__":
    from .features.prediction.command_line import parse

    given = parse()  # first, so that --help and wrong options need not wait for the import of transformers
    from .hf.predict_cli import main

    main(given)
