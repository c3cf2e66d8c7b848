r"""The host: what drives a decoder for many callers at once.

    engine -> model -> decoders -> replicas -> replica -> slots -> queue -> scheduler -> memory
                    \-> streams                      \-> device

`decoders` compiles for a model's weights. `config` has the settings, `use` says where a model may be used, `requests` has what callers ask for, `prompts` what
they may hand over, `completions` what they get and `totals` what those came to, `sequence` what is between. `chunks`
cuts prompts up for prefill, `saved_prefix` keeps their pages in files, `records` makes plain values of what a burst of
steps put out, and `scoring` reads given texts without continuing them. `loading` goes from a model's name to what
serves it, `memory` says what fits, `programs` keeps what is compiled, `clocks` measures what laws of drafts go by, and
`metrics` counts.
"""
