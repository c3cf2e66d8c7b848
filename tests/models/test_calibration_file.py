"""The calibrated temperature beside a model: written, read, refused."""

import pytest

from et_jax.errors import UsageError
from et_jax.models.calibration import read_calibration, write_calibration


def test_what_is_written_is_read(tmp_path):
    assert read_calibration(tmp_path) == 1.0
    write_calibration(tmp_path, 1.0625, {"tokens": 100})
    assert read_calibration(tmp_path) == 1.0625


@pytest.mark.parametrize(
    "text", ["", "{}", '{"temperature": "warm"}', '{"temperature": 0}', '{"temperature": NaN}', "[1]", "\udcff"]
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "calibration.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError, match=r"calibration\.json"):
        read_calibration(tmp_path)
