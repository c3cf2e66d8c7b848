"""Models as they stand in files and as functions.

    hub -> checkpoint -> transformer -> layers, config

`bundled` says where the models lie that travel with the package, `calibration` keeps a model's calibrated temperature
beside its weights.
"""
