"""Access control lists, users' passwords, delegation tokens and quotas are created and deleted in a
simulated cluster while its processes die.

    A1  a change of rules is in force in every worker of the host that acknowledges it
    A2  in the end every worker and every acceptor has the committed rules and quotas, every
        acceptor the passwords and tokens, and every controller all of them, whether it read the log
        or a snapshot; the committed state comes from an independent model (Model)
    A3  a token change is known to the acceptor that acknowledges it
    A4  in the end no expired token is left
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from mqd.cluster.host.messages import (
    AclsPut,
    AlterClientQuota,
    AlterScramCredentials,
    CreateAcls,
    CreateDelegationToken,
    CredentialsPut,
    DeleteAcls,
    FeatureUpdate,
    Image,
    MessageList,
    QuotaOperation,
    Response,
    SettingsPut,
    SetTokenExpiry,
    TokensPut,
    UpdateFeatures,
)
from mqd.cluster.metadata.features import MQD_VERSION
from mqd.cluster.metadata.records import (
    AclCreated,
    AclRemoved,
    ClientQuotaSet,
    DelegationToken,
    DelegationTokenRemoved,
    DelegationTokenSet,
    ScramCredential,
    ScramCredentialRemoved,
    ScramCredentialSet,
)
from mqd.security.acl import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from tests.sim.kernel import MILLISECOND, Violation

if TYPE_CHECKING:
    from tests.sim.cluster.cluster_world import ClusterWorld
    from tests.sim.cluster.host_processes import Acceptor

LEVEL = 3  # of mqd.version
LIFETIMES_MS = (300, 60_000)


class Model:
    def __init__(self) -> None:
        self.rules: dict[bytes, AclBinding] = {}
        self.passwords: dict[tuple[str, int], ScramCredential] = {}
        self.tokens: dict[str, DelegationToken] = {}
        self.quotas: dict[Any, dict[str, float]] = {}

    def apply(self, record: Any) -> None:
        """A committed record, in order."""
        match record:
            case AclCreated():
                self.rules[record.acl_id] = record.binding
            case AclRemoved():
                del self.rules[record.acl_id]
            case ScramCredentialSet():
                one = record.credential
                self.passwords[(one.user, one.mechanism)] = one
            case ScramCredentialRemoved():
                del self.passwords[(record.user, record.mechanism)]
            case DelegationTokenSet():
                self.tokens[record.token.token_id] = record.token
            case DelegationTokenRemoved():
                del self.tokens[record.token_id]
            case ClientQuotaSet():
                self.quotas[record.entity] = record.quotas
                if not record.quotas:
                    del self.quotas[record.entity]


class Known(Model):
    """What one process has received."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reported = False

    def receive(self, message: Any) -> None:
        match message:
            case Image():
                self.is_reported = True
                self.rules = dict(message.acls)
                self.passwords = {(one.user, one.mechanism): one for one in message.scram_credentials}
                self.tokens = {one.token_id: one for one in message.delegation_tokens}
                self.quotas = {one.entity: one.quotas for one in message.client_quotas}
            case MessageList():
                for part in message.parts:
                    self.receive(part)
            case SettingsPut(client_quotas=list(quotas)):
                self.quotas = {one.entity: one.quotas for one in quotas}
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
        names = ("created", "removed", "passwords", "tokens", "removed tokens", "quotas", "snapshots", "leaders")
        self.counts = dict.fromkeys(names, 0)
        self.model = Model()
        self._token_random, self._quota_random = Random(f"tokens {world.seed}"), Random(f"quotas {world.seed}")
        self._token_count = 0
        self._over_ms = 0  # when the changes end

    def begin(self) -> None:
        self.world.admin.requested.append(UpdateFeatures([FeatureUpdate(MQD_VERSION, LEVEL, 1)]))
        self._change()

    def _change(self) -> None:
        if self._over_ms:
            return
        if len(self.world.admin.requested) < 3:
            self.world.admin.requested.append(self._drawn())
        if len(self.world.admin.requested) < 3 and self._token_random.random() < 0.35:
            self.world.admin.requested.append(self._drawn_token())
        if len(self.world.admin.requested) < 3 and self._quota_random.random() < 0.2:
            self.world.admin.requested.append(self._drawn_quota())
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

    def _drawn_quota(self) -> Any:
        draw = self._quota_random
        entity = [("user", draw.choice(("u", "v", None)))]
        if draw.random() < 0.3:
            entity.append(("client-id", "c"))
        value = draw.choice((None, 1_000.0, 2_000.0))
        return AlterClientQuota(entity, [QuotaOperation("producer_byte_rate", value)])

    def applied(self, record: Any) -> None:
        self.model.apply(record)

    def on_answer(self, acceptor: Acceptor, change: Any, response: Response) -> None:
        """A1, A3. A response to a change that is not the administrator's current one has been
        superseded by a retry.
        """
        if response.error or change is not self.world.admin.change:
            return
        self._check_token(acceptor, change, response)
        for worker in acceptor.host.workers:
            known = worker.known if worker is not None and worker.process.alive else None
            if known is None or not known.is_reported:
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
            self.counts["removed"] += bool(response.removed_acls and response.removed_acls[0])
        elif isinstance(change, AlterScramCredentials):
            self.counts["passwords"] += 1
        elif isinstance(change, AlterClientQuota):
            self.counts["quotas"] += 1

    def _check_token(self, acceptor: Acceptor, change: Any, response: Response) -> None:
        tokens = acceptor.known.tokens
        if isinstance(change, CreateDelegationToken):
            self.counts["tokens"] += 1
            has_expired = change.token.expires_ms < self.world.wall_ms()
            if not has_expired and change.token.token_id not in tokens:
                raise Violation("A3", f"node {acceptor.host.node} does not know {change.token}")
        elif isinstance(change, SetTokenExpiry) and not response.token_error and change.period_ms < 0:
            self.counts["removed tokens"] += 1
            if change.token_id in tokens:
                raise Violation("A3", f"node {acceptor.host.node} still has the token {change.token_id}")

    def check(self) -> None:
        pass

    def heal(self) -> None:
        self._over_ms = self.world.wall_ms()

    def check_end(self) -> None:
        model = self.model
        self.counts["leaders"] = len(self.world.leaders)
        for host in self.world.hosts:
            for process in (*host.workers, host.acceptor):
                if process is None or not process.process.alive:
                    continue
                self._same(host.node, process.process.name, "rules", process.known.rules, model.rules)
                self._same(host.node, process.process.name, "quotas", process.known.quotas, model.quotas)
            if host.acceptor is not None:
                known = host.acceptor.known
                self._same(host.node, "acceptor", "passwords", known.passwords, model.passwords)
                self._same(host.node, "acceptor", "tokens", known.tokens, model.tokens)
            if host.controller is not None:
                state = host.controller.metadata.committed
                self._same(host.node, "controller", "rules", state.acls, model.rules)
                self._same(host.node, "controller", "passwords", state.scram_credentials, model.passwords)
                self._same(host.node, "controller", "tokens", state.delegation_tokens, model.tokens)
                self._same(host.node, "controller", "quotas", state.client_quotas, model.quotas)
            self.counts["snapshots"] += host.disk.snapshot is not None and host.disk.snapshot[0].offset > 0
        for token in model.tokens.values():
            if token.expires_ms < self._over_ms:
                raise Violation("A4", f"{token} is still there at {self.world.wall_ms()}")

    def _same(self, node: int, process: str, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise Violation("A2", f"node {node}: {process} has other {what} than are committed: {found}, {expected}")
