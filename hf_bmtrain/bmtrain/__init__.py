"""Functions and classes with the names and arguments of the library BMTrain, so that scripts written for it can run."""
