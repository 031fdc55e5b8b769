"""How versions are scored beside the training: when, where, and by hand."""
