"""What agents tell of workers, as the launcher gets it."""

from hvdlite_launcher.protocol.channel import Decoder, encode
from hvdlite_launcher.protocol.messages import StatusTold
from hvdlite_wire.worker_status import Source, Wait, WorkerStatus


def told(worker, number=0, *, in_full=False, waits=(), **fields):
    """Returns the event for a worker that has answered; it has gone over the wire. ``waits``: pairs."""
    status = WorkerStatus(
        worker=worker, **{"source": Source.ANSWER, **fields}, waits=tuple(Wait(*each) for each in waits)
    )
    (event,) = Decoder().feed(encode(StatusTold(worker, number, in_full, status)))
    return event
