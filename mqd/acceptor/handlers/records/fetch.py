"""The reactor handles Fetch 4-18. A Fetch frame that arrives here has an unsupported version, which
decoding has already refused.
"""

from mqd.acceptor.broker import CloseConnection, Context
from mqd.protocol.headers import RequestHeader


async def handle(context: Context, header: RequestHeader, request: object) -> None:
    raise CloseConnection(f"Fetch version {header.api_version} is answered by the workers")
