"""Other engines beside this one: a worker for each in its own environment, and weights in the format they read.

`worker` and `gguf_file` import nothing of the package at their top, for they run where it is not installed.
"""
