"""Decides when a log directory is treated as full: a reserve with hysteresis, sans I/O.

If less than the reserve is free, Produce requests are refused, so that fetching, deleting and
checkpoints still have room. They are accepted again only when clearly more is free; otherwise every
freed block would admit one batch. After a write that got ENOSPC the directory is treated as full
immediately, whatever statvfs reports (quotas, reserved blocks), for a hold time that doubles up to
ten seconds while such writes keep failing.
"""

HOLD_MS_MIN = 1_000
# A producer's records time out after two minutes by default: on a disk that fills up again and again
# they get many attempts before that.
HOLD_MS_MAX = 10_000


class SpaceGuard:
    """The guard of one log directory. `is_full` is the current state."""

    def __init__(self, reserve_bytes: int):
        self.reserve_bytes = reserve_bytes
        self.is_full = False
        self._hold_until_ms = 0
        self._hold_ms = HOLD_MS_MIN
        self._accepting_since_ms: int | None = None

    @property
    def resume_bytes(self) -> int:
        """The free space required before Produce is accepted again: a quarter more than the
        reserve, and at least 1 MiB more.
        """
        return self.reserve_bytes + max(self.reserve_bytes // 4, 1 << 20)

    def on_free_bytes(self, free_bytes: int, now_ms: int) -> bool:
        """Processes a new measurement; returns whether `is_full` changed."""
        if not self.is_full:
            if free_bytes >= self.reserve_bytes:
                if self._accepting_since_ms is not None and now_ms - self._accepting_since_ms > HOLD_MS_MAX:
                    self._hold_ms = HOLD_MS_MIN
                return False
            self.is_full = True
            return True
        if free_bytes < self.resume_bytes or now_ms < self._hold_until_ms:
            return False
        self.is_full = False
        self._accepting_since_ms = now_ms
        return True

    def on_write_refused(self, now_ms: int) -> bool:
        """Called when a write got ENOSPC or EDQUOT; returns whether `is_full` changed."""
        changed = not self.is_full
        if changed:
            self._hold_until_ms = now_ms + self._hold_ms
            self._hold_ms = min(2 * self._hold_ms, HOLD_MS_MAX)
        self.is_full = True
        return changed
