"""Training of the bundled model. Nothing that decodes imports this package."""
