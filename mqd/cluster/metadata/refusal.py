"""The exception for a refused change."""


class Refusal(Exception):
    """A change is refused, with Kafka's error code and a reason for the client."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = int(error)
        self.message = message
