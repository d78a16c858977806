"""One folder for each feature: its arithmetic, how it stores parameters, its layers, and when it is used."""
