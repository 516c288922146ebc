"""One-time formation of a cluster from empty hosts: a host with an empty metadata directory queries
the seeds, and decides from their responses. Sans-I/O.

A host that belongs to a cluster never queries. An empty host queries every seed until one of these
cases applies. If it is a seed itself, it recognizes itself by its own response.

    no seeds
        create a cluster alone, immediately
    a seed belongs to a cluster
        join that cluster: as a voter if this host is one of its founders, else as an observer
    every seed is empty, has the same list of seeds, and has seen exactly the same set of hosts
        create a cluster: its voters are the seeds, and its id is derived from their identities
    otherwise
        wait, and report the missing seeds; if a seed has not responded within ADVISE_MS, also report
        the possible causes, once

If seeds are configured, only seeds create a cluster.

Invariants
    F1  an identity is (node id, directory id); a wiped host has a new directory id, so it is not
        a voter of any cluster
    F2  a host founds a cluster only when the newest response of each seed, to a query of this
        process, says: empty, the same seeds, and `sees` = the set that this host sees. Two
        different sets can therefore never both have a majority: a host that sent "I see S" had not
        founded a cluster at that time, sees only later sets, and never returns to an earlier one
    F3  all founders of a set compute the same cluster id and the same voters, in any order of queries
    F4  a host with a new metadata directory that once belonged to a cluster (`lost_cluster_id`)
        neither founds a cluster nor counts as empty; it joins that cluster and no other
    F5  the identity is on disk (fsynced) before the first response is sent (mqd/controller ensures it)

Bounds: SEED_COUNT_MAX seeds; one query in flight per seed; a query counts as unanswered after
RESPONSE_MS_MAX.
"""

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Sequence

import msgspec

from mqd.base.cluster_config import format_address, parse_address

SEED_COUNT_MAX = 32
QUERY_WAIT_MS_MIN = 100  # between two queries to one seed; doubled after each query without a decision
QUERY_WAIT_MS_MAX = 2_000
RESPONSE_MS_MAX = 3_000
ADVISE_MS = 10_000  # by then all hosts that were started together are running
ADVICE = (
    "Check that each unreachable seed is running, and was itself started with --cluster-seeds: without this option a"
    " host does not listen for other hosts. HOST:PORT is the address of its controller listener, by default with the"
    " client port + 2. The seed's cluster.key.file must have the same key as this host's. See"
    ' "One host grows to three" in docs/operations.md'
)

# -- messages between hosts ------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, order=True):
    """A host with the address at which its controller listens."""

    node_id: int
    directory_id: str
    host: str
    port: int


class FormationQuery(msgspec.Struct, tag="FormationAsk", frozen=True):
    query_id: int = msgspec.field(name="ask_id")


class FormationResponse(msgspec.Struct, tag="FormationAnswer", frozen=True):
    query_id: int = msgspec.field(name="ask_id")
    member: Member  # the host that responds
    cluster_id: str  # "" = empty
    generation: int
    seeds: tuple[str, ...]  # in their normal form (normalise()), sorted
    sees: str  # set_digest() of all seeds, if the host has seen all of them empty; "" otherwise
    voters: tuple[Member, ...]  # the voters of its cluster
    # the host belonged to a cluster and has lost its metadata: it does not count as empty (F4)
    lost: bool = False


# -- events ----------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    pass


class ResponseReceived(msgspec.Struct, frozen=True):
    """A response over an authenticated connection to `seed`."""

    seed: str
    response: FormationResponse


class Unreachable(msgspec.Struct, frozen=True):
    """The query could not be delivered, or the connection ended before the response."""

    seed: str
    query_id: int
    reason: str


class QueryReceived(msgspec.Struct, frozen=True):
    """Another host's query. (Once this host belongs to a cluster, mqd/controller responds with
    response_of_member() instead.)
    """

    client: object
    query: FormationQuery


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Start | ResponseReceived | Unreachable | QueryReceived | Tick

# -- effects ---------------------------------------------------------------------------------------


class QuerySeed(msgspec.Struct, frozen=True):
    seed: str  # "host:port"
    query: FormationQuery


class RespondToQuery(msgspec.Struct, frozen=True):
    client: object
    response: FormationResponse


class CreateCluster(msgspec.Struct, frozen=True):
    """Become a voter of a new cluster; each of `voters` gets the same effect."""

    cluster_id: str
    voters: tuple[Member, ...]  # sorted


class Join(msgspec.Struct, frozen=True):
    """Become an observer of a cluster or, with `voter`, one of its founding voters, as if this host had
    founded it.
    """

    cluster_id: str
    generation: int
    voters: tuple[Member, ...]
    voter: bool


class Wait(msgspec.Struct, frozen=True):
    """No decision is possible yet. `reasons`: one line for each seed that prevents it. Returned again only
    when the reasons change. `advice`: what to check; given once, otherwise "".
    """

    reasons: tuple[str, ...]
    advice: str = ""


Effect = QuerySeed | RespondToQuery | CreateCluster | Join | Wait


def normalise(seed: str) -> str:
    """Returns the normal form of "Host:Port", for comparing the lists of two hosts. Raises ValueError."""
    host, port = parse_address(seed)
    if not host or not port:
        raise ValueError(f"{seed.strip()!r} is not HOST:PORT")
    return format_address(host, port)


def split(seed: str) -> tuple[str, int]:
    """Returns (host, port) of a normalised seed."""
    return parse_address(seed)


def set_digest(members: Sequence[Member]) -> str:
    """Returns a digest of the members' identities, which does not depend on addresses or order."""
    text = "\n".join(
        f"{node_id} {directory_id}"
        for node_id, directory_id in sorted((member.node_id, member.directory_id) for member in members)
    )
    return urlsafe_b64encode(hashlib.sha256(b"mqd cluster of\n" + text.encode()).digest()[:16]).rstrip(b"=").decode()


class _Seed(msgspec.Struct):
    response: FormationResponse | None = None  # the newest
    answered_ms: int = 0
    reason: str = "has not answered yet"
    query_id: int = 0  # id of the query in flight; 0 = none
    sent_ms: int = 0
    next_ms: int = 0
    wait_ms: int = QUERY_WAIT_MS_MIN


class FormationCore:
    """Only handle(event, now_ms) changes the state; now_ms is monotonic. `decision` is set once, to the
    effect with which handle() announced it.
    """

    def __init__(self, own: Member, seeds: Sequence[str], lost_cluster_id: str = "") -> None:
        self.own = own
        self._lost_cluster_id = lost_cluster_id
        self.seeds = tuple(sorted({normalise(seed) for seed in seeds}))
        if len(self.seeds) > SEED_COUNT_MAX:
            raise ValueError(f"cluster.seeds has {len(self.seeds)} seeds; at most {SEED_COUNT_MAX} are allowed")
        self.decision: CreateCluster | Join | None = None
        self._states = {seed: _Seed() for seed in self.seeds}
        self._query_count = 0
        self._reported_reasons: tuple[str, ...] | None = None
        self._advise_ms: int | None = None  # earliest time for the advice; None before Start
        self._advised = False

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        match event:
            case QueryReceived():
                return [RespondToQuery(event.client, self._response(event.query))]
            case ResponseReceived():
                return self._on_response(event, now_ms)
            case Unreachable():
                return self._on_unreachable(event, now_ms)
            case Start() | Tick():
                return self._step(now_ms)

    # -- responding ---------------------------------------------------------------------------------

    def _response(self, query: FormationQuery) -> FormationResponse:
        if self.decision is not None:
            return response_of_member(
                query,
                self.own,
                self.decision.cluster_id,
                getattr(self.decision, "generation", 0),
                self.seeds,
                self.decision.voters,
            )
        complete_set = self._complete_set()
        return FormationResponse(
            query.query_id,
            self.own,
            "",
            0,
            self.seeds,
            set_digest(complete_set) if complete_set else "",
            (),
            bool(self._lost_cluster_id),
        )

    def members(self) -> tuple[Member, ...]:
        """Returns the seeds that have responded."""
        return tuple(state.response.member for state in self._states.values() if state.response is not None)

    # -- querying ----------------------------------------------------------------------------------

    def _on_response(self, event: ResponseReceived, now_ms: int) -> list[Effect]:
        state = self._states.get(event.seed)
        if (
            self.decision is not None
            or state is None
            or event.response.query_id != state.query_id
            or not state.query_id
        ):
            return []
        changed = state.response is None or msgspec.structs.replace(
            state.response, query_id=0
        ) != msgspec.structs.replace(event.response, query_id=0)
        state.response, state.answered_ms, state.query_id = event.response, now_ms, 0
        state.wait_ms = QUERY_WAIT_MS_MIN if changed else min(QUERY_WAIT_MS_MAX, state.wait_ms * 2)
        state.next_ms = now_ms + state.wait_ms
        return self._step(now_ms)

    def _on_unreachable(self, event: Unreachable, now_ms: int) -> list[Effect]:
        state = self._states.get(event.seed)
        if state is not None and state.query_id == event.query_id and event.query_id:
            self._on_unanswered(state, event.reason, now_ms)
        return self._step(now_ms)

    @staticmethod
    def _on_unanswered(state: _Seed, reason: str, now_ms: int) -> None:
        state.response, state.reason, state.query_id = None, reason, 0
        state.wait_ms = min(QUERY_WAIT_MS_MAX, state.wait_ms * 2)
        state.next_ms = now_ms + state.wait_ms

    def _step(self, now_ms: int) -> list[Effect]:
        if self.decision is not None:
            return []
        decision = self._decide()
        if decision is not None:
            self.decision = decision
            return [decision]
        effects: list[Effect] = []
        for seed, state in self._states.items():
            if state.query_id and now_ms - state.sent_ms >= RESPONSE_MS_MAX:
                self._on_unanswered(state, f"has not answered within {RESPONSE_MS_MAX / 1000:.0f} s", now_ms)
            if not state.query_id and now_ms >= state.next_ms:
                self._query_count += 1
                state.query_id, state.sent_ms = self._query_count, now_ms
                effects.append(QuerySeed(seed, FormationQuery(self._query_count)))
        reasons, advice = self._reasons(), self._advice(now_ms)
        if reasons != self._reported_reasons or advice:
            self._reported_reasons = reasons
            effects.append(Wait(reasons, advice))
        return effects

    def _advice(self, now_ms: int) -> str:
        """Returns the advice once, if a seed has not responded within ADVISE_MS and is therefore probably
        not just starting; otherwise "".
        """
        if self._advise_ms is None:
            self._advise_ms = now_ms + ADVISE_MS
        if (
            self._advised
            or now_ms < self._advise_ms
            or all(state.response is not None for state in self._states.values())
        ):
            return ""
        self._advised = True
        return ADVICE

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self) -> CreateCluster | Join | None:
        if not self.seeds and not self._lost_cluster_id:
            return CreateCluster(set_digest([self.own]), (self.own,))
        member_responses = [
            state.response
            for state in self._states.values()
            if state.response is not None and state.response.cluster_id
        ]
        if member_responses:
            return self._join(member_responses)
        complete_set = self._complete_set()
        if complete_set is None or not any(self._is_own(member) for member in complete_set):
            return None
        digest = set_digest(complete_set)
        if any(state.response is None or state.response.sees != digest for state in self._states.values()):
            return None
        return CreateCluster(digest, tuple(sorted(complete_set)))

    def _join(self, responses: list[FormationResponse]) -> Join | None:
        if len({response.cluster_id for response in responses}) > 1:
            return None  # the seeds belong to different clusters, so an operator has to decide
        if self._lost_cluster_id and responses[0].cluster_id != self._lost_cluster_id:
            return None
        newest = max(responses, key=lambda response: (response.generation, len(response.voters)))
        # Only a founding voter may join as a voter: the founders' identities determine the cluster's id.
        # A voter that was added later already has the log.
        is_founder = set_digest(newest.voters) == newest.cluster_id and any(
            self._is_own(voter) for voter in newest.voters
        )
        return Join(newest.cluster_id, newest.generation, newest.voters, is_founder)

    def _is_own(self, member: Member) -> bool:
        return (member.node_id, member.directory_id) == (self.own.node_id, self.own.directory_id)

    def _complete_set(self) -> list[Member] | None:
        """Returns the seeds if all of them have responded, are empty, have the same list of seeds and are
        different hosts; otherwise None.
        """
        members = []
        for state in self._states.values():
            if (
                state.response is None
                or state.response.cluster_id
                or state.response.lost
                or state.response.seeds != self.seeds
            ):
                return None
            members.append(state.response.member)
        return members if len({member.node_id for member in members}) == len(members) else None

    def _reasons(self) -> tuple[str, ...]:
        reasons = []
        seed_of_node: dict[int, str] = {}
        for seed, state in self._states.items():
            response = state.response
            if response is None:
                reasons.append(f"{seed} {state.reason}")
            elif response.cluster_id:
                reasons.append(
                    f"{seed} belongs to cluster {response.cluster_id}"
                    + (f", but this host belonged to {self._lost_cluster_id}" if self._lost_cluster_id else "")
                )
            elif response.lost:
                reasons.append(f"{seed} belonged to a cluster and has lost its metadata")
            elif response.seeds != self.seeds:
                reasons.append(f"{seed} has a different list of seeds: {', '.join(response.seeds) or 'none'}")
            elif response.member.node_id in seed_of_node:
                reasons.append(
                    f"{seed} has node id {response.member.node_id}, like {seed_of_node[response.member.node_id]}:"
                    " each host needs its own node.id"
                )
            else:
                seed_of_node[response.member.node_id] = seed
        if (
            not reasons
            and self.seeds
            and not any(
                state.response is not None and self._is_own(state.response.member) for state in self._states.values()
            )
        ):
            reasons.append("this host is not one of the seeds: it waits until they have formed a cluster")
        elif not reasons:
            reasons.append("the other seeds have not seen each other yet")
        return tuple(reasons)


def response_of_member(
    query: FormationQuery,
    own: Member,
    cluster_id: str,
    generation: int,
    seeds: tuple[str, ...],
    voters: Sequence[Member],
) -> FormationResponse:
    """Returns the response of a host that belongs to a cluster; `voters`: the voters of its quorum."""
    return FormationResponse(query.query_id, own, cluster_id, generation, seeds, "", tuple(sorted(voters)))
