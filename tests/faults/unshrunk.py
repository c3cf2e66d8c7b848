"""A plugin of pytest by which hypothesis shrinks no failure, which takes minutes: for `scripts/plant_faults.py`."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("unshrunk")
