"""Control laws as values: each acts on one sequence and reads plain arrays, never a model or a kernel.

base, entropy                  what a law may read and set; entropy and varentropy of a distribution
clock, temperature, temperature_rules, tolerance, priority, smoothing, guards
view, bounds, contribution, selector, select, expected_error, bisect     block selection: which cache blocks are read
refresh                        when a sequence selects its blocks anew
compression, policies          when a cache is compressed and to what size; which entries it keeps
head_tolerance                 how much attention mass each query head may leave unread
experts                        how many experts of a mixture a token is routed to
draft, draft_speed             how many tokens a step drafts for a sequence; laws that maximise the expected speed
switch                         which of two models produces the next token
segment, budget                prompt segments, and the blocks that each segment reads
controller                     all laws combined into one value
presets, preset_laws           named controllers, their knobs and the laws they consist of
settings                       per-request changes to the numbers of a controller
"""
