"""The job's secret, from an environment variable or a file."""

import os

import pytest

from hvdlite.errors import LaunchEnvironmentError
from hvdlite.rendezvous.rank_info import given_secret, new_secret


def test_a_secret_is_read_from_the_variable_or_from_the_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    assert given_secret({"HVDLITE_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert given_secret({"HVDLITE_SECRET_FILE": str(file)}) == b"0123456789abcdef"
    assert given_secret({}) is None
    assert given_secret({"HVDLITE_SECRET": "", "HVDLITE_SECRET_FILE": ""}) is None


def test_what_protects_nothing_is_refused(tmp_path):
    readable, short, pipe = tmp_path / "readable", tmp_path / "short", tmp_path / "pipe"
    readable.write_text("0123456789abcdef")
    readable.chmod(0o640)
    short.write_text("1234")
    short.chmod(0o600)
    os.mkfifo(pipe, 0o600)
    for environ, words in [
        ({"HVDLITE_SECRET": "short"}, "HVDLITE_SECRET has 5 bytes, and needs at least 16"),
        ({"HVDLITE_SECRET_FILE": str(readable)}, f"chmod 600 {readable}"),
        ({"HVDLITE_SECRET_FILE": str(short)}, "has 4 bytes"),
        ({"HVDLITE_SECRET_FILE": str(pipe)}, "not a regular file"),
        ({"HVDLITE_SECRET_FILE": str(tmp_path / "none")}, "No such file"),
        ({"HVDLITE_SECRET": "x" * 16, "HVDLITE_SECRET_FILE": str(short)}, "both"),
    ]:
        with pytest.raises(LaunchEnvironmentError, match=words):
            given_secret(environ)


def test_a_new_secret_is_long_enough_and_new():
    assert given_secret({"HVDLITE_SECRET": new_secret()})
    assert new_secret() != new_secret()
