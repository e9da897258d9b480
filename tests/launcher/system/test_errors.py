"""The words for what a machine runs out of."""

import errno
import resource

import pytest
from hvdlite_launcher.errors import in_words, why_not_written

NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(("limit", "is_named"), [(400 << 20, True), (resource.RLIM_INFINITY, False)])
def test_a_limit_of_memory_is_named_where_a_thread_cannot_start(limit, is_named, monkeypatch):
    asked = []

    def getrlimit(which):
        asked.append(which)
        return limit, resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    said = in_words(NO_THREAD)
    assert ("ulimit -v" in said, "ulimit -u" in said) == (is_named, True)
    assert asked == [resource.RLIMIT_AS]


def test_a_limit_of_the_size_of_files_is_named():
    words = "this process may write no larger files: raise the limit with ulimit -f"
    assert why_not_written(OSError(errno.EFBIG, "File too large", "log")) == words
