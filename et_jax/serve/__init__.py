r"""The host: what drives a decoder for many callers at once.

    engine -> model -> streams -> replicas -> replica -> queue -> scheduler -> page_pool -> prefix_cache
                                                     \-> device

`config` has the settings, `use` says where a model may be used, `requests` has what callers ask for, `prompts` what
they may hand over, `completions` what they get and `totals` what those came to, `sequence` what is between. `chunks`
cuts prompts up for prefill, `records` makes plain values of what a burst of steps put out. `loading`, `sizing`,
`preflight` and `device_memory` say what a model needs and what fits, `verdict` says it by config.json alone,
`description` what was loaded; `scoring` reads given texts without continuing them; `calibrating` measures a model on
text; `min_context` from which length on a preset pays; `compilation` keeps programs in a `program_store`, and
`executables` what it takes to call them, by a `program_key`; `few_rows` has those for few sequences; `metrics` counts,
`step_clock` tells the laws of drafts what steps take, and `past_drafts` how drafts have fared.
"""
