"""Slots of the control segment: the slot of each partition, and the retiring slots. Part of the host
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
        self.unplaced: dict[Partition, None] = {}  # partitions for which no slot was free

    def adopt(self, partition: Partition, slot: int) -> None:
        """Assigns a used slot to its partition. Only during startup; end_adoption() sets `free` afterwards."""
        self.used[partition] = slot

    def end_adoption(self, slots: set[int]) -> None:
        """Sets `free`. `slots`: the slots in use."""
        self.free = [slot for slot in range(self.count) if slot not in slots]

    def get(self, partition: Partition) -> int:
        return self.used.get(partition, -1)

    def take(self, partition: Partition) -> int:
        """Returns the partition's slot, or assigns a free one. -1: no slot is free, and the partition
        waits.
        """
        slot = self.used.get(partition, -1)
        if slot >= 0:
            return slot
        if not self.free:
            self.unplaced[partition] = None
            return -1
        self.unplaced.pop(partition, None)
        slot = self.used[partition] = heapq.heappop(self.free)
        return slot

    def release(self, partition: Partition, version: int, users: set[int]) -> int:
        """Retires the slot of a partition that is no longer on this host. Returns the slot, which `users`
        (workers) may use until they have applied `version`; -1 if there was none.
        """
        self.unplaced.pop(partition, None)
        slot = self.used.pop(partition, -1)
        if slot >= 0:
            self.retire(slot, version, users)
        return slot

    def retire(self, slot: int, version: int, users: set[int]) -> None:
        self.retiring[slot] = (version, set(users))

    def on_applied(self, worker: int, version: int) -> None:
        for removal_version, users in self.retiring.values():
            if version >= removal_version:
                users.discard(worker)

    def on_worker_death(self, worker: int) -> None:
        for _, users in self.retiring.values():
            users.discard(worker)

    def free_retired(self) -> list[int]:
        """Frees and returns the retiring slots that no worker uses any longer."""
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
