"""Brokers' sessions: the time of each broker's last heartbeat at the active controller. In memory only:
a new controller restarts all sessions at its election (L2).

Times are the controller's own CLOCK_BOOTTIME in milliseconds, at receipt. A broker counts its lease
from the time of sending, so its lease ends first.
"""


class BrokerSessions:
    def __init__(self, session_ms: int) -> None:
        self._session_ms = session_ms
        self._last_heartbeats_ms: dict[int, int] = {}  # unfenced brokers: node id -> time

    def on_heartbeat(self, node_id: int, now_ms: int) -> None:
        """Restarts the broker's session at a heartbeat of its current registration, or when it is
        unfenced. The time never moves back.
        """
        self._last_heartbeats_ms[node_id] = max(now_ms, self._last_heartbeats_ms.get(node_id, now_ms))

    def restart(self, now_ms: int) -> None:
        """Restarts all sessions after a pause of this process, which cannot know which brokers were
        silent.
        """
        self._last_heartbeats_ms = {
            node_id: max(now_ms, last_heard_ms) for node_id, last_heard_ms in self._last_heartbeats_ms.items()
        }

    def forget(self, node_id: int) -> None:
        self._last_heartbeats_ms.pop(node_id, None)

    def expired(self, now_ms: int) -> list[int]:
        """Brokers whose session has ended, ordered by node id."""
        return sorted(
            node_id
            for node_id, last_heard_ms in self._last_heartbeats_ms.items()
            if now_ms - last_heard_ms >= self._session_ms
        )

    def next_expiry_ms(self) -> int | None:
        """The time at which the first session ends without further heartbeats; None if there is no session."""
        return min(self._last_heartbeats_ms.values()) + self._session_ms if self._last_heartbeats_ms else None

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._last_heartbeats_ms
