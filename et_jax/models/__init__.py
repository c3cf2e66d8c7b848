"""Models as they stand in files and as functions.

    hub -> checkpoint -> params -> experts -> layers -> weights, config
                                -> stacks -> config
                      -> families -> sources, config_file -> config
                      -> placing -> stored -> encodings, sources
           module_reading -> module -> calls, config
                transformer -> params, stacks

`model` is what the decoder asks of either: the `transformer` of this package, whose weights are `params`, or a `module`
of the caller's own, which `module_reading` has looked at, and `calls` has freed the attention of.
`local` finds what is on this machine (`bundled` inside this package, `packaged` inside others), `gguf` reads GGUF
files, `adapters` LoRA adapters, which `checkpoint` adds to weights, and `fingerprint` names a model by what its files
hold. `sensitivity` measures what depends on each head, and `calibration` keeps what was measured. `sharding` splits a
model over the chips of a mesh.
"""
