"""Events and actions of a group membership core, the same for both protocols.

The runner (runner.py) sends the requests of Send over one connection, in order, and passes back
ResponseReceived or ResponseMissing with the same number. The application's thread carries out Revoke,
Assign and Lost in poll(), one after the other, and ends each with Done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Partition(NamedTuple):
    """`topic_id`: b"" where the protocol has only names (classic)."""

    topic: str
    index: int  # type: ignore[assignment]  # not tuple's method
    topic_id: bytes = b""


Partitions = tuple[Partition, ...]

# ---- events ----


class Subscribe(msgspec.Struct, frozen=True):
    """Join, or change the subscription. `regex` is matched against whole names, by the coordinator
    (RE2) or, in the classic protocol, by the member; None: no expression.
    """

    topics: tuple[str, ...]
    regex: str | None = None


class Leave(msgspec.Struct, frozen=True):
    """Release all partitions and leave. Ends with Left."""


class ResponseReceived(msgspec.Struct, frozen=True):
    number: int
    message: Any


class ResponseMissing(msgspec.Struct, frozen=True):
    """The connection has ended, or the response could not be read. The coordinator may have handled the
    request.
    """

    number: int


class Done(msgspec.Struct, frozen=True):
    """The application has carried out the last Revoke, Assign or Lost."""


class TopicsKnown(msgspec.Struct, frozen=True):
    """The topics of Resolve that are known by now, and all other known topics. KIP-848: `names` by
    id. Classic: `counts` of partitions by name; 0: the topic does not exist, or cannot be read.
    """

    names: dict[bytes, str] = {}
    counts: dict[str, int] = {}


class Polled(msgspec.Struct, frozen=True):
    """The application has called poll()."""


class Tick(msgspec.Struct, frozen=True):
    """The time next_ms has come. `is_polling`: the application is in poll(), or has called it since the
    last Tick.
    """

    is_polling: bool = False


# ---- actions ----


class Send(msgspec.Struct, frozen=True):
    number: int
    api_key: int
    message: Any
    version_max: int = 1 << 15


class Assign(msgspec.Struct, frozen=True):
    """Adds `partitions` to the assignment."""

    partitions: Partitions


class Revoke(msgspec.Struct, frozen=True):
    """Commit, then stop reading `partitions`: another member may get them as soon as this is Done."""

    partitions: Partitions


class Lost(msgspec.Struct, frozen=True):
    """Stop reading `partitions`: they may have other owners already, and a commit would be refused."""

    partitions: Partitions


class Resolve(msgspec.Struct, frozen=True):
    """Look up topics; TopicsKnown follows, repeatedly until the ids are known. `topics`: the names for
    which partition counts are needed; None: all topics (the subscription has an expression).
    """

    topic_ids: tuple[bytes, ...] = ()
    topics: tuple[str, ...] | None = ()


class Problem(msgspec.Struct, frozen=True):
    """An error for the application. `code`: an error code of Kafka, or a negative one of librdkafka.
    `is_fatal`: the member has stopped, and only a new consumer can join.
    """

    code: int
    text: str
    is_fatal: bool = False


class Left(msgspec.Struct, frozen=True):
    """The member has left, as requested."""


Event = Subscribe | Leave | ResponseReceived | ResponseMissing | Done | TopicsKnown | Polled | Tick
Action = Send | Assign | Revoke | Lost | Resolve | Problem | Left
