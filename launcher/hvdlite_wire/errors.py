"""The error of everything that decodes what another process has sent."""


class MessageError(ValueError):
    """Received bytes or values are no message of the expected type."""
