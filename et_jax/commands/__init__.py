"""What the arguments of a command line mean: its `files`, and the `settings` of model, requests and batch."""
