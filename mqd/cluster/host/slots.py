"""Slots of the control segment: which partition has which, which wait to be free. Part of the host
core; invariants H1 and H2.
"""

import heapq

Partition = tuple[bytes, int]  # topic id, index


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self.used: dict[Partition, int] = {}
        self.free: list[int] = list(range(count))  # heap
        # slot -> (version of the removal, workers that may still use it)
        self.retiring: dict[int, tuple[int, set[int]]] = {}
        self.unplaced: dict[Partition, None] = {}  # no slot was free

    def adopt(self, partition: Partition, slot: int) -> None:
        """While starting: `free` is told at the end (seen)."""
        self.used[partition] = slot

    def seen(self, slots: set[int]) -> None:
        self.free = [slot for slot in range(self.count) if slot not in slots]

    def get(self, partition: Partition) -> int:
        return self.used.get(partition, -1)

    def take(self, partition: Partition) -> int:
        """The partition's, or a free one; -1: none is free, it waits."""
        slot = self.used.get(partition, -1)
        if slot >= 0:
            return slot
        if not self.free:
            self.unplaced[partition] = None
            return -1
        self.unplaced.pop(partition, None)
        slot = self.used[partition] = heapq.heappop(self.free)
        return slot

    def give_up(self, partition: Partition, version: int, users: set[int]) -> int:
        """The partition is not here any more. Its slot, which `users` (workers) use until they have
        applied `version`; -1 when it had none.
        """
        self.unplaced.pop(partition, None)
        slot = self.used.pop(partition, -1)
        if slot >= 0:
            self.retire(slot, version, users)
        return slot

    def retire(self, slot: int, version: int, users: set[int]) -> None:
        self.retiring[slot] = (version, set(users))

    def applied(self, worker: int, version: int) -> None:
        for since, users in self.retiring.values():
            if version >= since:
                users.discard(worker)

    def died(self, worker: int) -> None:
        for _, users in self.retiring.values():
            users.discard(worker)

    def free_retired(self) -> list[int]:
        """Those that nobody uses any more; they are free now."""
        ready = [slot for slot, (_, users) in self.retiring.items() if not users]
        for slot in ready:
            del self.retiring[slot]
            heapq.heappush(self.free, slot)
        return ready

    def check(self, alive: set[int]) -> None:
        used, retiring, free = set(self.used.values()), set(self.retiring), set(self.free)
        assert len(used) == len(self.used) and len(free) == len(self.free), "H1"
        assert (
            not used & retiring
            and not used & free
            and not retiring & free
            and len(used | retiring | free) == self.count
        ), "H1"
        assert all(users and users <= alive for _, users in self.retiring.values()), "H2"
        assert self.unplaced.keys().isdisjoint(self.used), "H1"
