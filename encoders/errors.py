"""User errors of this package."""


class EncoderError(ValueError):
    """A media item that an encoder cannot take. The message has the numbers and the key to change."""
