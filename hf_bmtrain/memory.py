"""Predict how much memory a training step needs, given a model's config.json: `python -m hf_bmtrain.memory CONFIG`."""

if __name__ == "__main__":
    from .features.prediction.command_line import parse

    given = parse()  # parse before the slow import of transformers, so that --help and errors appear at once
    from .hf.predict_cli import main

    main(given)
