"""Run a script written for BMTrain: `python -m hf_bmtrain.run SCRIPT [ARGUMENTS]`, with torchrun too."""

if __name__ == "__main__":
    from .bmtrain.run import main

    main()
