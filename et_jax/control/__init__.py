"""Laws as values: each of one sequence, seeing plain arrays, neither model nor kernel.

base, entropy                  what a law may see and set; how uncertain a distribution is
clock, temperature, temperature_rules, tolerance, priority, smoothing, guards
view, bounds, contribution, selector, select, expected_error, bisect     which blocks of the cache are read
compression, policies          when a cache is compressed and to what; which of its entries are kept
head_tolerance                 how much of its attention each query head may leave unread
experts                        how many of a mixture's experts a token goes to
draft, draft_speed             how many tokens a step drafts for a sequence; laws that go by the expected speed
switch                         which of two models speaks
segment, budget                what of a prompt is seen, and read, segment by segment
controller                     laws put together
presets, preset_laws           controllers by name, their knobs and what they are made of
settings                       numbers of a controller changed by name, for one request
"""
