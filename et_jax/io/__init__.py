"""The edges to the world outside: values of callers, files whole or refused, what a terminal takes."""
