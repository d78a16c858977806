"""One folder for each optional feature of training, and `auto_wrap`, which applies the features to a model."""
