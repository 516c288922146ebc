"""When the active controller last heard of each broker. In memory only: a new controller starts all
sessions at its own election (L2).

Times are the controller's own CLOCK_BOOTTIME in milliseconds, at receipt; a broker counts its lease
from when it sent, so it ends first.
"""


class BrokerSessions:
    def __init__(self, session_ms: int) -> None:
        self._session_ms = session_ms
        self._heard: dict[int, int] = {}  # unfenced brokers: node id -> when

    def heard(self, node_id: int, now_ms: int) -> None:
        """A heartbeat of the broker's registration in force, or its unfencing. Never moves back."""
        self._heard[node_id] = max(now_ms, self._heard.get(node_id, now_ms))

    def restart(self, now_ms: int) -> None:
        """All sessions begin anew: this process stood still and cannot tell who was silent."""
        self._heard = {node_id: max(now_ms, heard_ms) for node_id, heard_ms in self._heard.items()}

    def forget(self, node_id: int) -> None:
        self._heard.pop(node_id, None)

    def expired(self, now_ms: int) -> list[int]:
        """Brokers whose session has ended, by node id."""
        return sorted(node_id for node_id, heard_ms in self._heard.items() if now_ms - heard_ms >= self._session_ms)

    def next_expiry_ms(self) -> int | None:
        """When the first of them ends if nobody is heard any more; None: nobody has one."""
        return min(self._heard.values()) + self._session_ms if self._heard else None

    def remaining_ms(self, node_id: int, now_ms: int) -> int:
        """Of the session of one broker; 0 = none."""
        heard_ms = self._heard.get(node_id)
        return 0 if heard_ms is None else max(0, heard_ms + self._session_ms - now_ms)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._heard
