"""Programs compiled for chips that are absent.

    kernels, decoders -> programs, chips
    notebooks, slices -> decoders

`chips` has the chips and the models, `programs` what is asked of a program and how it is traced. No weight exists, and
nothing here runs on a device: the compilers can be told first that no chip is there.
"""
