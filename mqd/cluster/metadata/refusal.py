"""The reason that a change is refused."""


class Refusal(Exception):
    """The change violates a rule: Kafka error code and the reason, for the client."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(message)
        self.error = int(error)
        self.message = message
