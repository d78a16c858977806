"""What the recipes that train on BoolQ share: questions, batches, model and report."""
