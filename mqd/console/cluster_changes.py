"""Changes that abort transactions, and that start or stop moves of replicas."""

from __future__ import annotations

from collections.abc import Mapping

from mqd.cli import moves
from mqd.cli import transactions as txns
from mqd.cli.broker_lookup import Cluster
from mqd.cli.cluster_view import ClusterState
from mqd.cli.common import CliError, Settings
from mqd.cli.kafka_request import Broker
from mqd.cli.moves import Partition, Plan
from mqd.cli.verbs.group import duration_text, ranges_text
from mqd.console.changing import BadForm, Change, Form, Row, command_of, required

MOVES_PAGE: tuple[str, dict[str, str]] = ("/moves", {})


# -- transactions ----------------------------------------------------------------------------------


def whole_number(form: Form, name: str, description: str) -> int:
    text = required(form, name, description)
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise BadForm(f"{description}: {text!r} is not a number")
    return int(text)


def abort(settings: Settings, form: Form) -> Change:
    """Aborts a transaction by its id; or by partition and first offset if no coordinator knows it."""
    if form.get("id", "").strip():
        return _abort_by_id(settings, form["id"].strip())
    topic = required(form, "topic", "a transactional id, or a topic, partition and offset")
    index, offset = whole_number(form, "partition", "a partition"), whole_number(form, "offset", "an offset")
    with Cluster(settings.bootstrap) as cluster:
        producer, coordinator_view = txns.find_open_transaction(cluster, topic, index, offset, None)
    effects = [
        f"The transaction of producer id {producer.producer_id} that begins at {topic}-{index} offset {offset} is"
        " aborted: read_committed consumers skip its records."
    ]
    if coordinator_view is not None and coordinator_view.state == "Ongoing":
        effects.append(
            f"It belongs to {coordinator_view.transactional_id}: it is aborted in all of its partitions, and its"
            " producer fenced."
        )
    else:
        effects.append(f"It has written nothing for {duration_text(producer.idle_ms)}, and no coordinator will end it.")
    if txns.maybe_committed(coordinator_view, producer):
        assert coordinator_view is not None
        effects.append(
            f"{coordinator_view.transactional_id} may already have committed it, and this partition may have lost the"
            " marker in a power failure (possible if the topic has flush.on.ack=false): once the transaction is"
            " aborted, read_committed consumers will never see its records in this partition."
        )

    def apply() -> None:
        with Cluster(settings.bootstrap) as cluster:
            current, _ = txns.find_open_transaction(cluster, topic, index, offset, None)
            txns.abort_in_partition(cluster, current)

    return Change(
        f"Abort the transaction that begins at {topic}-{index} offset {offset}?",
        command_of(settings, "txn", "abort", topic, str(index), str(offset), "--execute"),
        effects,
        apply,
        f"Aborted the transaction that began at {topic}-{index} offset {offset}.",
        ("/transactions", {"show": "hanging"}),
        is_dangerous=True,
    )


def _abort_by_id(settings: Settings, name: str) -> Change:
    with Cluster(settings.bootstrap) as cluster:
        transaction = txns.describe(cluster, name)
        txns.check_open(transaction)

    def apply() -> None:
        with Cluster(settings.bootstrap) as cluster:
            current = txns.describe(cluster, name)
            txns.check_open(current)
            if (current.producer_id, current.producer_epoch, current.started_ms) != shown_identity:
                raise CliError(f"the transaction shown here has ended; {name} has begun another one")
            txns.abort_by_id(cluster, current)

    shown_identity = (transaction.producer_id, transaction.producer_epoch, transaction.started_ms)
    return Change(
        f"Abort the transaction of {name}?",
        command_of(settings, "txn", "abort", name, "--execute"),
        [
            f"It has been open for {duration_text(transaction.open_ms or 0)}. Its records are never seen by readers of"
            " committed records.",
            f"Its producer (id {transaction.producer_id}, epoch {transaction.producer_epoch}) is fenced: it fails at"
            " its next request, and its application must start again.",
        ],
        apply,
        f"Aborted the transaction of {name}.",
        ("/transaction", {"id": name}),
        ("Topic", "Partitions"),
        [(topic, ranges_text(indexes)) for topic, indexes in sorted(transaction.partitions.items())],
        is_dangerous=True,
    )


# -- replicas --------------------------------------------------------------------------------------


def _plan_rows(before: Mapping[Partition, list[int]], plan: Plan) -> list[Row]:
    def nodes_text(replicas: list[int]) -> str:
        return ", ".join(map(str, replicas))

    return [
        (f"{topic}-{index}", nodes_text(before.get((topic, index), [])), nodes_text(target))
        for (topic, index), target in sorted(plan.items())
    ]


_PLAN_TITLES = ("Partition", "Replicas now", "Planned replicas")


def balance(settings: Settings, form: Form) -> Change:
    from mqd.cluster.metadata.rules.placement import BALANCE_MOVES_MAX

    topics = form.get("topics", "").split()
    with Broker(settings.bootstrap) as broker:
        before = moves.replicas_of_all(broker)
        plan = moves.balance(broker, topics, dry_run=True)
    if not plan:
        raise CliError("the cluster is balanced already; nothing would move")
    summary = moves.summarize(before, plan)
    effects = [f"{line}." for line in summary.lines("would move", "would get")]
    if summary.copy_count:
        replicas_text = f"{summary.copy_count} replica{'s' * (summary.copy_count != 1)}"
        effects.append(f"{replicas_text} would be copied to other brokers first.")
    if max(summary.copy_count, summary.leader_change_count) >= BALANCE_MOVES_MAX:
        effects.append(
            f"A plan has {BALANCE_MOVES_MAX} moves at most; when it is done, the controller makes the next plan."
        )

    def apply() -> None:
        with Broker(settings.bootstrap) as broker:
            moves.balance(broker, topics, dry_run=False)

    return Change(
        "Spread replicas and leaders evenly over the brokers?",
        command_of(settings, "cluster", "balance", *topics, "--no-wait"),
        effects,
        apply,
        "The controller has begun the planned moves.",
        MOVES_PAGE,
        _PLAN_TITLES,
        _plan_rows(before, plan),
    )


def drain(settings: Settings, form: Form) -> Change:
    node, cancel = whole_number(form, "node", "a broker's number"), form.get("cancel") == "1"
    state = ClusterState(settings)
    if node not in {broker.broker_id for broker in state.brokers}:
        raise CliError(f"there is no broker {node}")
    with Broker(settings.bootstrap) as broker:
        if not broker.is_mqd():
            raise CliError(
                "Apache Kafka cannot drain a broker, only mqd can; move its replicas with mqd topic reassign"
            )
        before = moves.replicas_of_all(broker)
    held_partitions = {partition: replicas for partition, replicas in before.items() if node in replicas}
    others = [broker.broker_id for broker in state.brokers if not broker.is_fenced and broker.broker_id != node]
    unplaceable = [partition for partition, replicas in held_partitions.items() if len(replicas) > len(others)]

    def apply() -> None:
        with Broker(settings.bootstrap) as broker:
            moves.drain(broker, node, cancel)

    if cancel:
        effects = [
            f"Broker {node} can have replicas again, such as those of new topics. Replicas that have left it return"
            " only when the cluster is balanced."
        ]
    else:
        preferred_leader_count = sum(replicas[0] == node for replicas in held_partitions.values())
        effects = [
            f"{len(held_partitions)} replica{'s' * (len(held_partitions) != 1)} of broker {node} move to other brokers,"
            f" {preferred_leader_count} of them the preferred leader{'s' * (preferred_leader_count != 1)}; the"
            " controller chooses where. Records are copied first, so they stay readable throughout.",
            f"Broker {node} gets no replicas of new topics. Once it holds no replica, it can be stopped permanently.",
        ]
    if unplaceable and not cancel:
        topic, index = min(unplaceable)
        refusal = (
            f"{len(unplaceable)} partition{'s' * (len(unplaceable) > 1)}, such as {topic}-{index},"
            f" {'have' if len(unplaceable) > 1 else 'has'} more replicas than there would be brokers; start or add a"
            " broker"
        )
    else:
        refusal = ""
    return Change(
        f"{'Stop draining' if cancel else 'Drain'} broker {node}?",
        command_of(settings, "cluster", "drain", str(node), *(["--cancel"] if cancel else ["--no-wait"])),
        effects,
        apply,
        f"Broker {node} {'can have replicas again' if cancel else 'is being drained'}.",
        MOVES_PAGE,
        () if cancel else ("Partition", "Replicas now"),
        []
        if cancel
        else [
            (f"{topic}-{index}", ", ".join(map(str, replicas)))
            for (topic, index), replicas in sorted(held_partitions.items())
        ],
        refusal=refusal,
    )


def cancel_moves(settings: Settings, form: Form) -> Change:
    topic = required(form, "topic", "a topic")
    with Broker(settings.bootstrap) as broker:
        ongoing = moves.ongoing_moves(broker, topic)
    if not ongoing:
        raise CliError(f"topic {topic}: no replicas are moving")

    def apply() -> None:
        with Broker(settings.bootstrap) as broker:
            if current := moves.ongoing_moves(broker, topic):
                moves.begin(broker, dict.fromkeys(current))

    def remaining_nodes(move: moves.Move) -> str:
        return ", ".join(str(node) for node in move.replicas if node not in move.adding)

    return Change(
        f"Stop the moves of {topic}?",
        command_of(settings, "topic", "reassign", topic, "--cancel"),
        [
            "Its replicas stay where they were; the new copies are deleted. Replicas of a broker that is being"
            " drained begin to move again, unless you stop draining it first."
        ],
        apply,
        f"The replicas of {topic} stay where they were.",
        MOVES_PAGE,
        ("Partition", "Replicas"),
        [(f"{name}-{index}", remaining_nodes(move)) for (name, index), move in sorted(ongoing.items())],
    )
