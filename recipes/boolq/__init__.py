"""The BoolQ job, shared by its three recipes: questions, batches, classifier, report."""
