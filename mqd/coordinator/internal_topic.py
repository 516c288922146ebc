"""The coordinator's view of its internal topic (__consumer_offsets, __transaction_state), and the
mapping from a name to a partition of it.
"""

import functools
from typing import NamedTuple, Protocol

from mqd.coordinator.actions import CoreFactory
from mqd.coordinator.shard import LoadedPartition
from mqd.protocol.errors import error_name


class CoordinatorError(Exception):
    """The request was not carried out, or its outcome is unknown. Carries a retriable code for the
    client.
    """

    def __init__(self, error_code: int) -> None:
        super().__init__(error_name(error_code))
        self.error_code = int(error_code)


class ServedPartition(NamedTuple):
    """A partition of the internal topic that can be loaded now, with its current offsets."""

    leader_epoch: int
    owner_generation: int
    end_offset: int  # log end
    high_watermark: int

    def is_same_term_as(self, other: "ServedPartition") -> bool:
        """Whether the leader epoch and the owner's generation are the same."""
        return (self.leader_epoch, self.owner_generation) == (other.leader_epoch, other.owner_generation)


class Partitions(Protocol):
    """The internal topic as seen in the metadata and the partition table."""

    def count(self) -> int:
        """Number of partitions; 0: the topic does not exist (yet)."""

    def served(self, partition: int) -> ServedPartition | None:
        """The partition's state. None: it is not served at the moment."""

    async def load(self, partition: int, end_offset: int, cores: CoreFactory) -> LoadedPartition:
        """Reads the log up to `end_offset` in a thread, once earlier loads from the same directory
        have finished. Raises OSError, or its subclass TimeoutError if the log directory does not
        respond.
        """

    async def create(self) -> bool:
        """Creates the topic. False: not possible now."""

    def is_led_elsewhere(self, partition: int) -> bool:
        """Whether another host leads the partition and runs its coordinator."""

    def may_lead(self) -> bool:
        """Whether this host holds its lease. Checked on each request."""


# only a hostile client uses longer names; a cache full of them would take gigabytes
NAME_CHARS_CACHED = 256


def _hash(name: str) -> int:
    """Java's String.hashCode, made positive as Kafka's Utils.abs does."""
    value = _hash_short_name(name) if len(name) <= NAME_CHARS_CACHED else _hash_long_name(name)
    if value >= 1 << 31:
        value -= 1 << 32
    return 0 if value == -(1 << 31) else abs(value)


@functools.lru_cache(maxsize=1 << 16)
def _hash_short_name(name: str) -> int:
    """The hash as an unsigned number."""
    value = 0
    data = name.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(data), 2):
        value = (31 * value + (data[position] << 8 | data[position + 1])) & 0xFFFFFFFF
    return value


def _hash_long_name(name: str) -> int:
    """Same result as _hash_short_name. A plain loop over 32767 characters would block the event
    loop for milliseconds.
    """
    import numpy

    units = numpy.frombuffer(name.encode("utf-16-be", "surrogatepass"), ">u2").astype(numpy.uint32)
    powers = numpy.full(len(units), 31, numpy.uint32)
    powers[0] = 1
    return int((units * numpy.cumprod(powers, dtype=numpy.uint32)[::-1]).sum(dtype=numpy.uint32))


def partition_for(name: str, partition_count: int) -> int:
    """The partition of the internal topic that a group id or transactional id belongs to."""
    return _hash(name) % partition_count
