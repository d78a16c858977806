"""BMTrain's public names, and where the parts of the library are put together."""
