"""The edges to the world outside.

values              what callers give: each as a plain one of the kind that is wanted, or a sentence
knobs               settings that are fields of a dataclass, with what each means and its bounds
files, checksums    files whole or not there; folders whose every file has a checksum
texts               files of text that a user names
schema, gguf        what the JSON files of a model folder may say; the values and tensors of a GGUF file
terminal, bar       what a stream is able to show; a progress bar
known               figures of which some are not known, told as missing
html                plain values as HTML: tables, text coloured by entropy
own_sources         a digest of the package's own sources, as they were imported
cell                a place in the output of a notebook cell
later               threads whose work a process can do without: which of it the end waits for
"""
