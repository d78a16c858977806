"""Print what is installed, what training would use and what is missing: `python -m hf_bmtrain [--report]`."""

if __name__ == "__main__":
    from .features.installation.command import main

    main()
