"""Shared code of the command lines: `flags` and `command` (arguments, exit codes), `streams`, `signals`, `paths`."""
