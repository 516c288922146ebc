"""Changes to the quorum's voters, requested by an operator or automatic
(mqd/cluster/raft/promotion.py). They are made on the active controller, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mqd.base import clock, logging
from mqd.cluster.host import messages
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.raft import events, promotion
from mqd.cluster.raft.messages import ReplicaKey, Voter
from mqd.cluster.raft.progress import ReplicaView
from mqd.controller.quorum import Quorum
from mqd.protocol.errors import ErrorCode

CAUGHT_UP_MS_MAX = 1_000
RETRY_S = 5.0

log = logging.get("controller.voters")


class VoterChanges:
    def __init__(self, quorum: Quorum, metadata: MetadataCore) -> None:
        self._quorum, self._metadata = quorum, metadata
        self._is_change_in_progress = False  # an automatic change
        self._next_try = 0.0  # time.monotonic()

    # -- requested --------------------------------------------------------------------------------

    def request(self, request: messages.Request, respond: Callable[[messages.Response], None]) -> None:
        change = request.change
        if isinstance(change, messages.DescribeQuorum):
            respond(messages.Response(request.request_id, 0, quorum=self.image()))
            return
        assert isinstance(change, messages.AddVoter | messages.RemoveVoter)

        def on_end(error: int, text: str) -> None:
            respond(messages.Response(request.request_id, error, text or None))

        if isinstance(change, messages.RemoveVoter):
            removed = self._voter_key(change)
            self._quorum.change_voters(lambda token: events.RemoveVoter(token, removed), on_end)
            return
        broker = self._metadata.committed.brokers.get(change.node_id)
        key = promotion.key_of(broker) if broker is not None else None
        if (
            broker is None
            or key is None
            or not broker.controller_host
            or change.directory_id not in (b"", key.directory_id)
        ):
            on_end(
                int(ErrorCode.INVALID_REQUEST),
                f"Node {change.node_id} with this directory is not registered, or no other host can reach its"
                " controller.",
            )
            return
        voter = Voter(key, broker.controller_host, broker.controller_port)
        self._quorum.change_voters(lambda token: events.AddVoter(token, voter), on_end)

    def _voter_key(self, change: messages.RemoveVoter) -> ReplicaKey:
        voter_key = next(
            (
                voter.key
                for voter in self._quorum.voters
                if voter.node_id == change.node_id and change.directory_id in (b"", voter.key.directory_id)
            ),
            None,
        )
        return voter_key if voter_key is not None else ReplicaKey(change.node_id, change.directory_id)

    def image(self) -> messages.QuorumImage:
        """Returns the response to DescribeQuorum. Ages are converted to wall-clock times, which clients
        can interpret.
        """
        now_ms = clock.now_ms()
        core = self._quorum.core
        view = core.describe(clock.boottime_ns())
        brokers = self._metadata.committed.brokers
        addresses = {voter.key: (voter.host, voter.port) for voter in self._quorum.voters}

        def replica_image(replica: ReplicaView) -> messages.QuorumReplica:
            broker = brokers.get(replica.key.node_id)
            host, port = addresses.get(replica.key) or (
                (broker.controller_host, broker.controller_port) if broker is not None else ("", 0)
            )
            fetch_age_ms, caught_up_age_ms = (
                age_ns // 1_000_000 for age_ns in (replica.last_fetch_age_ns, replica.last_caught_up_age_ns)
            )
            return messages.QuorumReplica(
                replica.key.node_id,
                replica.key.directory_id,
                replica.log_end_offset,
                now_ms - fetch_age_ms if fetch_age_ms >= 0 else -1,
                now_ms - caught_up_age_ms if caught_up_age_ms >= 0 else -1,
                host,
                port,
            )

        return messages.QuorumImage(
            view.leader,
            view.epoch,
            view.high_watermark,
            [replica_image(replica) for replica in view.voters],
            [replica_image(replica) for replica in view.observers],
            core.settings.promise_ns // 1_000_000,
        )

    # -- automatic --------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self._metadata.active or self._is_change_in_progress or time.monotonic() < self._next_try:
            return
        brokers = list(self._metadata.committed.brokers.values())
        voters = self._quorum.voters
        if moved := promotion.moved_voter(voters, brokers):
            self._change(
                lambda token: events.UpdateVoter(token, moved),
                f"the quorum records the new address of node {moved.node_id}",
            )
            return
        candidates = promotion.candidates(voters, brokers, self._quorum.voters_trend)
        caught_up = (
            {
                observer.key
                for observer in self._quorum.core.describe(clock.boottime_ns()).observers
                if 0 <= observer.last_caught_up_age_ns <= CAUGHT_UP_MS_MAX * 1_000_000
            }
            if candidates
            else set()
        )
        new_voter = next((voter for voter in candidates if voter.key in caught_up), None)
        if new_voter is not None:
            self._change(
                lambda token: events.AddVoter(token, new_voter),
                f"node {new_voter.node_id} becomes a voter of the quorum",
            )

    def _change(self, make_event: Callable[[object], events.Event], description: str) -> None:
        log.info(description)
        self._is_change_in_progress = True

        def on_end(error: int, message: str) -> None:
            self._is_change_in_progress = False
            self._next_try = time.monotonic() + (RETRY_S if error else 0)
            if error:
                log.info(
                    "a change of the quorum's voters was not made",
                    change=description,
                    error=ErrorCode(error).name,
                    reason=message,
                )

        self._quorum.change_voters(make_event, on_end)
