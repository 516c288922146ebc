"""Fetch 4-18 is the reactor's; a frame of it that comes here is of no version that is spoken, and
decoding has refused it already.
"""

from mqd.acceptor.broker import CloseConnection, Context
from mqd.protocol.framing import RequestHeader


async def handle(context: Context, header: RequestHeader, request: object) -> None:
    raise CloseConnection(f"Fetch version {header.api_version} is answered by the workers")
