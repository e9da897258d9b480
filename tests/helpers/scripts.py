"""Events that happen as a test says, in no time."""

from queue import Empty


class Script:
    """A queue that gives what it holds, and then lets all the time pass that somebody waits."""

    def __init__(self, *events):
        self._events = list(events)
        self.now = 0.0

    def get(self, timeout):
        if self._events:
            return self._events.pop(0)
        self.now += timeout
        raise Empty
