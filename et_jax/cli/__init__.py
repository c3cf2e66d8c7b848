"""What the command lines share: arguments, streams, signals, exit codes, paths."""
