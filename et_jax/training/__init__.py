"""Training of the bundled model. Nothing that decodes imports this package; it needs the `train` extra."""
