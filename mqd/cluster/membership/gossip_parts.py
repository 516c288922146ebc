"""Small parts of gossip: replay window, local health, suspicion, queue of updates, token bucket. No
clock: time is passed in, in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from mqd.cluster.membership.gossip_messages import NODE_NONE

WINDOW_BITS = 256
UPDATE_BYTES_MIN = 20  # minimum size of an update


class ReplayWindow:
    """Replay window of one sender: the highest number of its newest life, and which of the WINDOW_BITS
    numbers before it were received.

    A datagram from before the window is refused as well: its content is outdated.
    """

    __slots__ = ("_bits", "_life", "_top")

    def __init__(self) -> None:
        self._life, self._top, self._bits = 0, 0, 0

    def accept(self, life: int, sequence: int) -> bool:
        """Returns True once for each (life, sequence), and False for an earlier life."""
        if life != self._life:
            if life < self._life:
                return False
            self._life, self._top, self._bits = life, sequence, 1
            return True
        ahead = sequence - self._top
        if ahead > 0:
            self._bits = (self._bits << min(ahead, WINDOW_BITS) | 1) & ((1 << WINDOW_BITS) - 1)
            self._top = sequence
            return True
        if ahead <= -WINDOW_BITS or self._bits >> -ahead & 1:
            return False
        self._bits |= 1 << -ahead
        return True


class Health:
    """Lifeguard's local health: 0 = healthy. A host that receives few messages is probably faulty itself,
    so it probes and suspects more slowly (times `multiplier`).
    """

    __slots__ = ("_max", "score")

    def __init__(self, score_max: int) -> None:
        self._max, self.score = score_max, 0

    def worsen(self, by: int = 1) -> None:
        self.score = min(self._max, self.score + by)

    def improve(self) -> None:
        self.score = max(0, self.score - 1)

    @property
    def multiplier(self) -> int:
        return self.score + 1


class Suspicion:
    """Lifeguard's suspicion: lasts long while no other host confirms it. Each confirmation by another host
    shortens it (logarithmically: the first one has the largest effect).
    """

    __slots__ = ("_confirmations_max", "_longest_ms", "_shortest_ms", "confirmers", "since_ms")

    def __init__(self, since_ms: int, shortest_ms: int, factor_max: int, confirmations_max: int, by: int) -> None:
        self.since_ms = since_ms
        self._shortest_ms, self._longest_ms = shortest_ms, shortest_ms * factor_max
        self._confirmations_max = confirmations_max
        self.confirmers = [by]  # node ids; the first is the host that began the suspicion

    def confirm(self, by: int) -> bool:
        """Adds a confirmation. Returns True if it is from a new host and has an effect."""
        if by in self.confirmers or len(self.confirmers) > self._confirmations_max:
            return False
        self.confirmers.append(by)
        return True

    @property
    def deadline_ms(self) -> int:
        if self._confirmations_max < 1:
            return self.since_ms + self._shortest_ms
        share = math.log(len(self.confirmers)) / math.log(self._confirmations_max + 1)
        return self.since_ms + max(
            self._shortest_ms, int(self._longest_ms - (self._longest_ms - self._shortest_ms) * share)
        )


class Broadcasts:
    """Queue of updates, one per key: a newer update replaces the older one. Each update is put into a
    certain number of datagrams; the updates that were sent least often go first.

    Bound: `count_max` keys; beyond it the update that was sent most often is dropped (push-pull
    delivers it later).
    """

    def __init__(self, count_max: int) -> None:
        self._levels: list[dict[Hashable, bytes]] = []  # index: number of times sent
        self._level_of: dict[Hashable, int] = {}
        self._count_max = count_max

    def __len__(self) -> int:
        return len(self._level_of)

    def put(self, key: Hashable, data: bytes) -> None:
        self.drop(key)
        if not self._levels:
            self._levels.append({})
        self._levels[0][key] = data
        self._level_of[key] = 0
        if len(self._level_of) > self._count_max:
            most_sent = next(level for level in reversed(self._levels) if level)
            self.drop(next(iter(most_sent)))

    def drop(self, key: Hashable) -> None:
        level = self._level_of.pop(key, None)
        if level is not None:
            del self._levels[level][key]

    def take(self, bytes_max: int, count_max: int, sends_max: int) -> list[bytes]:
        """Returns updates for one datagram. An update is removed once it has been sent `sends_max` times."""
        taken: list[tuple[int, Hashable, bytes]] = []
        for sent_count, level in enumerate(self._levels):
            for key, data in level.items():
                if len(taken) >= count_max or bytes_max < UPDATE_BYTES_MIN:
                    break
                if len(data) <= bytes_max:
                    taken.append((sent_count, key, data))
                    bytes_max -= len(data)
        for sent_count, key, data in taken:
            del self._levels[sent_count][key]
            if sent_count + 1 >= sends_max:
                del self._level_of[key]
                continue
            if sent_count + 1 == len(self._levels):
                self._levels.append({})
            self._levels[sent_count + 1][key] = data
            self._level_of[key] = sent_count + 1
        return [data for _, _, data in taken]

    def check(self) -> None:
        assert len(self._level_of) <= self._count_max
        assert sum(map(len, self._levels)) == len(self._level_of)
        assert all(key in self._levels[level] for key, level in self._level_of.items())


class TokenBucket:
    """A token bucket with a rate of `rate_per_s` and a burst of `burst`."""

    __slots__ = ("_burst", "_rate", "_tokens", "_refilled_ms")

    def __init__(self, rate_per_s: int, burst: int, now_ms: int) -> None:
        self._rate, self._burst, self._tokens, self._refilled_ms = rate_per_s, burst, float(burst), now_ms

    def take(self, now_ms: int) -> bool:
        self._tokens = min(float(self._burst), self._tokens + max(0, now_ms - self._refilled_ms) * self._rate / 1000)
        self._refilled_ms = now_ms
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class ControllerHint:
    """The active controller of the highest known epoch."""

    __slots__ = ("epoch", "node_id")

    def __init__(self) -> None:
        self.epoch, self.node_id = -1, NODE_NONE

    def learn(self, epoch: int, node_id: int) -> bool:
        """Stores the controller if its epoch is higher than the known one; returns whether it is."""
        if epoch <= self.epoch or node_id == NODE_NONE:
            return False
        self.epoch, self.node_id = epoch, node_id
        return True
