"""Run a script written for BMTrain: `python -m hf_bmtrain.run SCRIPT [ARGUMENTS]`, or with torchrun's option -m."""

if __name__ == "__main__":
    from .bmtrain.run import main

    main()
