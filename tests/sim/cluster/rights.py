"""Access control lists, users' passwords and delegation tokens that come and go in a simulated
cluster while its processes die.

    A1  a change of rules that is answered with success is in force in every worker of the host that
        answers
    A2  in the end every worker and every acceptor has the rules that are committed, and every
        acceptor the passwords and tokens
    A3  a change of a token that is answered with success is known to the acceptor that asked
    A4  in the end no token is left that expired before
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from mqd.cluster.host.messages import (
    AclsPut,
    AlterScramCredentials,
    Answer,
    CreateAcls,
    CreateDelegationToken,
    CredentialsPut,
    DeleteAcls,
    FeatureUpdate,
    Image,
    SetTokenExpiry,
    Several,
    TokensPut,
    UpdateFeatures,
)
from mqd.cluster.metadata.features import MQD_VERSION
from mqd.cluster.metadata.records import DelegationToken, ScramCredential
from mqd.security.acl import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from tests.sim.kernel import MILLISECOND, Violation

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld
    from tests.sim.cluster.host_processes import Acceptor

LEVEL = 3  # of mqd.version
LIFETIMES_MS = (300, 60_000)


class Known:
    """What one process has been told of rules and passwords."""

    def __init__(self) -> None:
        self.is_told = False
        self.rules: dict[bytes, AclBinding] = {}
        self.passwords: dict[tuple[str, int], ScramCredential] = {}
        self.tokens: dict[str, DelegationToken] = {}

    def hear(self, message: Any) -> None:
        match message:
            case Image():
                self.is_told = True
                self.rules = dict(message.acls)
                self.passwords = {(one.user, one.mechanism): one for one in message.scram_credentials}
                self.tokens = {one.token_id: one for one in message.delegation_tokens}
            case Several():
                for part in message.parts:
                    self.hear(part)
            case AclsPut():
                for acl_id in message.removed:
                    self.rules.pop(acl_id, None)
                self.rules.update(message.put)
            case CredentialsPut():
                for user, mechanism in message.removed:
                    self.passwords.pop((user, mechanism), None)
                self.passwords.update({(one.user, one.mechanism): one for one in message.put})
            case TokensPut():
                for token_id in message.removed:
                    self.tokens.pop(token_id, None)
                self.tokens.update({one.token_id: one for one in message.put})


class Rights:
    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.random = Random(f"rights {world.seed}")
        self.counts = {"created": 0, "removed": 0, "passwords": 0, "tokens": 0, "removed tokens": 0}
        self._token_random = Random(f"tokens {world.seed}")
        self._token_count = 0
        self._over_ms = 0  # the end of the changes

    def begin(self) -> None:
        self.world.admin.wanted.append(UpdateFeatures([FeatureUpdate(MQD_VERSION, LEVEL, 1)]))
        self._change()

    def _change(self) -> None:
        if self._over_ms:
            return
        if len(self.world.admin.wanted) < 3:
            self.world.admin.wanted.append(self._drawn())
        if len(self.world.admin.wanted) < 3 and self._token_random.random() < 0.35:
            self.world.admin.wanted.append(self._drawn_token())
        self.world.kernel.after(self.random.randrange(20, 300) * MILLISECOND, None, self._change)

    def _drawn(self) -> Any:
        dice, user = self.random.random(), self.random.choice("uvw")
        if dice < 0.45:
            rule = AclBinding(
                ResourceType.TOPIC,
                PatternType.LITERAL,
                self.random.choice("abc"),
                f"User:{user}",
                "*",
                Operation.READ,
                self.random.choice([Permission.ALLOW, Permission.DENY]),
            )
            return CreateAcls([rule])
        if dice < 0.8:
            return DeleteAcls([AclFilter(name=self.random.choice("abc"), principal=f"User:{user}")])
        credential = ScramCredential(user, 1, b"salt", 4096, self.random.randbytes(4), b"s")
        return AlterScramCredentials(*(([], [credential]) if dice < 0.93 else ([(user, 1)], [])))

    def _drawn_token(self) -> Any:
        now_ms, draw = self.world.wall_ms(), self._token_random
        if self._token_count and draw.random() < 0.55:
            token_id = f"t{draw.randint(max(1, self._token_count - 1), self._token_count)}"
            period_ms, is_renewal = draw.choice([(400, True), (200, False), (-1, False), (-1, False), (-1, False)])
            return SetTokenExpiry(token_id, "User:w", now_ms, period_ms, is_renewal)
        self._token_count += 1
        name, life_ms = f"User:{draw.choice('uvw')}", draw.choice(LIFETIMES_MS)
        return CreateDelegationToken(
            DelegationToken(f"t{self._token_count}", name, name, ("User:w",), now_ms, now_ms + 60_000, now_ms + life_ms)
        )

    def on_answer(self, acceptor: Acceptor, change: Any, answer: Answer) -> None:
        """A1, A3. A change that is not the administrator's present one was asked for again since."""
        if answer.error or change is not self.world.admin.change:
            return
        self._check_token(acceptor, change, answer)
        for worker in acceptor.host.workers:
            known = worker.known if worker is not None and worker.process.alive else None
            if known is None or not known.is_told:
                continue
            rules = set(known.rules.values())
            if isinstance(change, CreateAcls):
                wrong = [rule for rule in change.bindings if rule not in rules]
            elif isinstance(change, DeleteAcls):
                wrong = [rule for rule in rules if change.filters[0].matches(rule)]
            else:
                wrong = []
            if wrong:
                raise Violation("A1", f"node {acceptor.host.node}: worker {worker.index} does not apply {change}")
        if isinstance(change, CreateAcls):
            self.counts["created"] += 1
        elif isinstance(change, DeleteAcls):
            self.counts["removed"] += bool(answer.removed_acls and answer.removed_acls[0])
        elif isinstance(change, AlterScramCredentials):
            self.counts["passwords"] += 1

    def _check_token(self, acceptor: Acceptor, change: Any, answer: Answer) -> None:
        tokens = acceptor.known.tokens
        if isinstance(change, CreateDelegationToken):
            self.counts["tokens"] += 1
            has_expired = change.token.expires_ms < self.world.wall_ms()
            if not has_expired and change.token.token_id not in tokens:
                raise Violation("A3", f"node {acceptor.host.node} does not know {change.token}")
        elif isinstance(change, SetTokenExpiry) and not answer.token_error and change.period_ms < 0:
            self.counts["removed tokens"] += 1
            if change.token_id in tokens:
                raise Violation("A3", f"node {acceptor.host.node} still has the token {change.token_id}")

    def check(self) -> None:
        pass

    def heal(self) -> None:
        self._over_ms = self.world.wall_ms()

    def check_end(self) -> None:
        state = self.world.state
        for host in self.world.hosts:
            for process in (*host.workers, host.acceptor):
                if process is None or not process.process.alive:
                    continue
                if process.known.rules != state.acls:
                    raise Violation("A2", f"node {host.node}: {process.process.name} has other rules")
            if host.acceptor is not None and host.acceptor.known.passwords != state.scram_credentials:
                raise Violation("A2", f"node {host.node}: the acceptor has other passwords")
            if host.acceptor is not None and host.acceptor.known.tokens != state.delegation_tokens:
                raise Violation("A2", f"node {host.node}: the acceptor has other tokens")
        for token in state.delegation_tokens.values():
            if token.expires_ms < self._over_ms:
                raise Violation("A4", f"{token} is still there at {self.world.wall_ms()}")
