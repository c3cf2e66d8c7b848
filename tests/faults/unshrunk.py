"""A plugin of pytest by which hypothesis does not shrink what fails, for `scripts/plant_faults.py`: that takes minutes."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("unshrunk")
