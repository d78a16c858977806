"""One folder for each feature: what it computes, how it stores parameters, and when it is chosen."""
