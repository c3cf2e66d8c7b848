"""Files of a model as they are read."""

from et_jax.io.schema import read_bytes


def test_room_is_made_for_what_a_file_has_and_not_for_what_it_may_have(tmp_path):
    (tmp_path / "a").write_bytes(b"all of it")
    assert read_bytes(tmp_path / "a", 2**60) == b"all of it"
