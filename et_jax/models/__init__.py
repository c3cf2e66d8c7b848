"""Models as they stand in files and as functions: configuration, layers, the transformer, checkpoints."""
