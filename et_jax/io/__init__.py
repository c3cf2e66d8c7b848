"""Input and output at the edges of the package.

values              values from callers: each converted to the requested plain type, or refused in a sentence
knobs               settings that are fields of a dataclass, with their meaning and bounds
files, checksums    atomic writes of files; folders whose every file has a checksum
texts               text files that a user names
json_files, schema  the JSON files of a model folder, read and validated; their fields
gguf                the values and tensors of a GGUF file
terminal, bar       the abilities of a stream; a progress bar
known               figures that may be unknown, reported as missing
html                plain values as HTML: tables, text coloured by entropy
own_sources         a digest of the package's own sources, as they were imported
cell                a place in the output of a notebook cell
later               optional background threads, and which of their work the process waits for at its end
"""
