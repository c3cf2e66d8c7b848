r"""The host: what drives a decoder for many callers at once.

    engine -> model -> decoders -> replicas -> replica -> slots -> queue -> scheduler -> memory
                    \-> streams                      \-> device

`config` has the settings, `use` says where a model may be used, `decoders` compiles programs for a model's weights.
`requests` has what callers ask for, `prompts` what they may pass, `completions` what they receive, of several the
`best_of` them, and `totals` sums of it; `sequence` is a request while it is served. `chunks` cuts prompts up for
prefill, `saved_prefix` stores their pages in files, `bursts` decodes by bursts of steps, `records` makes plain values
of their outputs, and `scoring` scores given texts without continuing them. `loading` goes from a model's name to a
decoder, `memory` says what fits, `programs` caches what is compiled, `clocks` measures what laws of drafts depend on,
and `metrics` counts.
"""
