"""`Script`: a queue with a simulated clock, for tests of code that waits for events."""

from queue import Empty


class Script:
    """A queue that returns its events first; then each `get` advances ``now`` by its timeout and raises Empty."""

    def __init__(self, *events):
        self._events = list(events)
        self.now = 0.0

    def get(self, timeout):
        if self._events:
            return self._events.pop(0)
        self.now += timeout
        raise Empty
