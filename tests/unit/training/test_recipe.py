"""The recipes of the bundled models."""

import pytest

from et_jax.errors import UsageError
from et_jax.models.params import num_multiplied, num_weights
from et_jax.training import recipe
from et_jax.training.recipe import long_settings
from et_jax.training.schedule import Curriculum


def test_a_token_meets_as_many_weights_of_the_mixture_as_of_the_dense_model_but_for_the_routers():
    mixture, dense = recipe.experts_config(), recipe.dense_config()
    routers = mixture.num_layers * 16 * mixture.hidden_size
    assert num_multiplied(mixture) - routers == num_multiplied(dense) == num_weights(dense)
    assert num_weights(mixture) == pytest.approx(1.9 * num_weights(dense), rel=0.05)
    for model in (mixture, dense):
        assert recipe.compared_settings(model).schedule.lengths[-1] == model.max_positions


def test_a_setting_grows_rows_beyond_2048():
    grown = long_settings(longest=8192)
    assert grown.model.max_positions == grown.window == grown.schedule.lengths[-1] == 8192
    assert grown.schedule.lengths[-3:] == (2048, 4096, 8192)
    assert isinstance(grown.schedule, Curriculum)
    begins = [begin for begin, _ in grown.schedule.stages]
    assert begins == sorted(begins)
    for longest in (5000, 1024):
        with pytest.raises(UsageError, match="choose 2048, 4096, 8192"):
            long_settings(longest=longest)
    with pytest.raises(UsageError, match="belongs to --recipe long"):
        recipe.settings("short", 0, 8192)
