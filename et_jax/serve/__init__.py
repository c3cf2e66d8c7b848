r"""The host: what drives a decoder for many callers at once.

    engine -> streams -> replicas -> replica -> queue -> scheduler -> page_pool
                                            \-> device

`config` has the settings, `requests` what callers ask for, `completions` what they get, `sequence` what is between.
`loading`, `sizing`, `preflight` and `device_memory` say what a model needs and what fits.
"""
