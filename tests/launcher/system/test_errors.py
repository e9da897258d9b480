"""The words for what a machine runs out of."""

import errno

from hvdlite_launcher.errors import in_words, why_not_written


def test_limits_of_threads_are_named():
    said = in_words(RuntimeError("can't start new thread"))
    assert ("ulimit -v" in said, "ulimit -u" in said) == (True, True)
    assert in_words(RuntimeError("another")) is None


def test_a_limit_of_the_size_of_files_is_named():
    words = "this process may write no larger files: raise the limit with ulimit -f"
    assert why_not_written(OSError(errno.EFBIG, "File too large", "log")) == words
