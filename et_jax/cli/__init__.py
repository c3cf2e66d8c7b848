"""What the command lines share: `flags` and `command` (arguments, exit codes), `streams`, `signals`, `paths`."""
