"""`mqd group`: list, describe, delete, seek, delete-offsets."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import EXIT_FAILED, Settings, completing, emit_json, emit_table, error_line, options
from mqd.cli.common import CliError as CliError

if TYPE_CHECKING:
    from mqd.cli.group_listing import DelayingMember, Group, Member, Progress

_TYPES = ("classic", "consumer", "share")
_STATES = ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Assigning", "Reconciling", "Dead")
_DELETE_GROUPS = 42
WAITED_FOR_TEXTS = {
    "join": "to join again: it must poll",
    "sync": "to fetch its assignment",
    "assignment": "to compute the assignment: it is the leader",
    "first join": "to join with its assigned member id",
    "revocation": "to release partitions",
    "return": "to return: it is an absent static member",
    "heartbeat": "to send a heartbeat",
}


@click.group(help="List, describe and delete consumer and share groups, and move their offsets.")
def command() -> None:
    pass


@completing
def complete_group(bootstrap: str) -> Iterable[str]:
    from mqd.cli.group_listing import names

    return names(bootstrap)


def duration_text(milliseconds: int) -> str:
    """Formats a duration, such as "12 s" or "3 min 2 s"; "?" if it is not known."""
    from mqd.cli.verbs.status import duration

    return "?" if milliseconds < 0 else duration(milliseconds // 1000)


def ranges_text(indexes: list[int]) -> str:
    """Formats partition numbers, such as "0-3,5"."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def assignment_text(assignment: dict[str, list[int]] | None) -> str:
    if assignment is None:
        return "(in the clients' own format)"
    return " ".join(f"{topic}:{ranges_text(indexes)}" for topic, indexes in sorted(assignment.items())) or "-"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- list ------------------------------------------------------------------------------------------


@command.command("list")
@options
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_STATES, case_sensitive=False),
    help="Only groups in this state; may be repeated.",
)
@click.option(
    "--type",
    "types",
    multiple=True,
    type=click.Choice(_TYPES, case_sensitive=False),
    help="Only groups of this protocol; may be repeated.",
)
def list_(settings: Settings, states: tuple[str, ...], types: tuple[str, ...]) -> None:
    """List consumer and share groups: a table on a terminal, otherwise only names."""
    import sys

    from mqd.cli.broker_lookup import Cluster, report_left_out
    from mqd.cli.group_listing import matching_groups

    with Cluster(settings.bootstrap) as cluster:
        groups, unavailable = matching_groups(cluster, states, types)
    report_left_out("group", list(unavailable))
    if settings.json:
        emit_json(
            [
                {
                    "group": group.group,
                    "type": group.type,
                    "protocol_type": group.protocol_type,
                    "protocol": group.protocol,
                    "state": group.state,
                    "members": len(group.members),
                }
                for group in groups
            ]
        )
    elif sys.stdout.isatty():
        emit_table(
            ("GROUP", "TYPE", "PROTOCOL", "STATE", "MEMBERS"),
            [(group.group, group.type, group.protocol or "-", group.state, len(group.members)) for group in groups],
        )
    else:
        for group in groups:
            click.echo(group.group)


# -- describe --------------------------------------------------------------------------------------


def member_labels(group: "Group") -> dict[str, str]:
    """Member id -> a short unique label: the member's instance id or client id. If several members
    share it, the label also has enough of the rest of the member id to tell them apart.
    """
    members_by_name: dict[str, list[Member]] = {}
    for member in group.members:
        members_by_name.setdefault(member.instance_id or member.client_id, []).append(member)
    labels: dict[str, str] = {}
    for name, members in members_by_name.items():
        id_suffixes = {member.member_id: member.member_id.removeprefix(name).lstrip("-") for member in members}
        length = next(
            (n for n in range(4, 40) if len({suffix[:n] for suffix in id_suffixes.values()}) == len(id_suffixes)), 40
        )
        labels |= {
            member_id: f"{name} {suffix[:length]}" if len(members) > 1 else name
            for member_id, suffix in id_suffixes.items()
        }
    return labels


def _member_json(member: "Member") -> dict[str, Any]:
    return {
        "member_id": member.member_id,
        "client_id": member.client_id,
        "host": member.host,
        "instance_id": member.instance_id,
        "assignment": member.assignment,
        "target_assignment": member.target,
        "epoch": member.epoch,
    }


def _describe_json(group: "Group", rows: "list[Progress]") -> dict[str, Any]:
    import msgspec

    return {
        "group": group.group,
        "type": group.type,
        "state": group.state,
        "protocol_type": group.protocol_type,
        "protocol": group.protocol,
        "epoch": group.epoch,
        "assignment_epoch": group.assignment_epoch,
        "lag": sum(row.lag or 0 for row in rows),
        "rebalance": msgspec.to_builtins(group.rebalance) if group.rebalance is not None else None,
        "members": [_member_json(member) for member in group.members],
        "partitions": [
            {
                "topic": row.topic,
                "partition": row.partition,
                "committed_offset": row.committed_offset,
                "log_start_offset": row.log_start_offset,
                "log_end_offset": row.log_end_offset,
                "lag": row.lag,
                "member_id": row.member.member_id if row.member else None,
                "note": row.note or None,
            }
            for row in rows
        ],
    }


def _show_rebalance(group: "Group", labels: dict[str, str]) -> None:
    is_rebalancing = group.state not in ("Stable", "Empty", "Dead")
    if group.rebalance is None:
        if is_rebalancing:
            click.echo("\nrebalancing; this broker does not report which members delay it")
        return
    rebalance = group.rebalance
    duration = f" for {duration_text(rebalance.elapsed_ms)}" if rebalance.elapsed_ms >= 0 else ""
    click.echo(f"\nrebalancing{duration}{': ' + rebalance.reason if rebalance.reason else ''}")
    if not rebalance.held_up_by:
        click.echo("no member delays it: the rebalance waits briefly for more members to join, or is about to end")
        return
    click.echo("held up by:")

    def row(delaying: "DelayingMember") -> tuple[str, ...]:
        silent = "-" if delaying.silent_ms < 0 else duration_text(delaying.silent_ms) + " ago"
        return (
            labels.get(delaying.member_id, delaying.instance_id or delaying.client_id),
            delaying.host,
            WAITED_FOR_TEXTS.get(delaying.waited_for, delaying.waited_for),
            duration_text(delaying.waited_ms),
            silent,
        )

    emit_table(
        ("MEMBER", "HOST", "WAITED FOR", "FOR", "LAST HEARD"), [row(delaying) for delaying in rebalance.held_up_by]
    )
    click.echo("a member that exceeds its rebalance timeout (max.poll.interval.ms) is removed from the group")


def _show(group: "Group", rows: "list[Progress]") -> None:
    labels = member_labels(group)
    protocol = f"{group.type} protocol{f' ({group.protocol})' if group.protocol else ''}"
    lag = f", lag {sum(row.lag or 0 for row in rows)}" if rows else ""
    epoch = f", epoch {group.epoch}" if group.epoch is not None else ""
    click.echo(f"group {group.group}: {group.state}, {_plural(len(group.members), 'member')}, {protocol}{epoch}{lag}")
    _show_rebalance(group, labels)
    if group.members:
        click.echo()
        has_targets = any(member.target is not None for member in group.members)
        titles = ("MEMBER", "HOST", "ASSIGNED", *(("TO BE ASSIGNED",) if has_targets else ()), "MEMBER ID")
        member_rows = []
        for member in group.members:
            target = (("=" if member.target is None else assignment_text(member.target)),) if has_targets else ()
            member_rows.append(
                (labels[member.member_id], member.host, assignment_text(member.assignment), *target, member.member_id)
            )
        emit_table(titles, sorted(member_rows))
    if rows:
        click.echo()
        partition_rows = []
        for row in rows:
            numbers = ["-" if value is None else value for value in (row.committed_offset, row.log_end_offset, row.lag)]
            partition_rows.append(
                (row.topic, row.partition, *numbers, labels[row.member.member_id] if row.member else "-", row.note)
            )
        offset = "START" if group.type == "share" else "COMMITTED"
        emit_table(("TOPIC", "PARTITION", offset, "LOG END", "LAG", "MEMBER", ""), partition_rows)
    elif not group.members:
        click.echo("the group has no committed offsets")


@command.command()
@options
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
def describe(settings: Settings, name: str) -> None:
    """Show the members of GROUP, its lag and how far it has read in each partition; and during a
    rebalance, which members are delaying it, and for how long.
    """
    from mqd.cli.broker_lookup import Cluster
    from mqd.cli.group_listing import must_describe, progress

    with Cluster(settings.bootstrap) as cluster:
        group = must_describe(cluster, name)
        rows = progress(cluster, group)
    if settings.json:
        emit_json(_describe_json(group, rows))
    else:
        _show(group, rows)


# -- delete ----------------------------------------------------------------------------------------


@command.command()
@options
@click.argument("names", nargs=-1, required=True, metavar="GROUP...", shell_complete=complete_group)
@click.option("--if-exists", is_flag=True, help="No error when a group does not exist.")
def delete(settings: Settings, names: tuple[str, ...], if_exists: bool) -> None:
    """Delete groups and their committed offsets. A group that has members cannot be deleted."""
    from mqd.cli.broker_lookup import GROUP, Cluster
    from mqd.cli.group_listing import GROUP_ID_NOT_FOUND, explain
    from mqd.protocol.errors import ErrorCode
    from mqd.protocol.messages import DeleteGroupsRequest

    deleted, failures, exit_code = [], [], EXIT_FAILED
    with Cluster(settings.bootstrap) as cluster:
        for name in dict.fromkeys(names):
            request = DeleteGroupsRequest(groups_names=[name])
            try:
                error = (
                    cluster.request_coordinator(
                        GROUP, name, _DELETE_GROUPS, request, lambda response: response.results[0].error_code
                    )
                    .results[0]
                    .error_code
                )
            except CliError as problem:  # the coordinators of the other groups may be reachable
                failures.append(f"group {name}: {problem.message}")
                exit_code = max(exit_code, problem.exit_code)
                continue
            if not error:
                deleted.append(name)
            elif error == ErrorCode.NON_EMPTY_GROUP:
                failures.append(f"group {name} has members; stop them first (mqd group describe {name} names them)")
            elif not (error == GROUP_ID_NOT_FOUND and if_exists):
                failures.append(
                    f"there is no group {name}; with --if-exists that is not an error"
                    if error == GROUP_ID_NOT_FOUND
                    else f"group {name}: {explain(error)}"
                )
    if settings.json:
        emit_json({"deleted": deleted})
    else:
        for name in deleted:
            click.echo(f"deleted group {name}")
    if failures:
        raise CliError("; ".join(failures), exit_code)


# -- advise ----------------------------------------------------------------------------------------


@command.command(short_help="Compute how many members or partitions GROUP needs for the current rate.")
@options
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    help="Time between the two samples. Choose several times the members' commit interval.",
)
@click.option(
    "--catch-up",
    "catch_up_minutes",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.1, 10080),
    metavar="MINUTES",
    help="Time within which the group should also read its backlog.",
)
def advise(settings: Settings, name: str, seconds: float, catch_up_minutes: float) -> None:
    """Compute how many members or partitions GROUP needs for the rate at which its topics are
    written.

    The capacity of a member is the rate at which a member that is always busy reads. It is measured
    from two samples of the committed offsets.
    """
    import time

    from mqd.cli.broker_lookup import LATEST, Cluster
    from mqd.cli.group_listing import SHARE, commits, must_describe
    from mqd.cli.inspection import group_advice

    def sample(cluster: Cluster) -> group_advice.GroupSample:
        group = must_describe(cluster, name)
        if group.type == SHARE:
            raise CliError(
                f"{name} is a share group: any number of members shares its partitions. Add members while its lag grows"
                f" (mqd group describe {name})"
            )
        members = {
            member.member_id: frozenset(
                (topic, index) for topic, indexes in (member.assignment or {}).items() for index in indexes
            )
            for member in group.members
        }
        committed = {partition: commit.offset for partition, commit in commits(cluster, name).items()}
        partitions = frozenset(committed).union(*members.values())
        cluster.topics({topic for topic, _ in partitions})
        sampled_at_s = time.monotonic()
        ends = cluster.offsets(partitions, LATEST)
        return group_advice.GroupSample(sampled_at_s, ends, committed, members)

    with Cluster(settings.bootstrap) as cluster:
        before = sample(cluster)
        time.sleep(seconds)
        advice = group_advice.advise(before, sample(cluster), catch_up_minutes * 60)
    if settings.json:
        emit_json({"group": name, **advice._asdict(), "hot": [list(one) for one in advice.hot]})
        return
    click.echo(
        f"group {name}: {_plural(advice.members, 'member')}, {_plural(advice.partitions, 'partition')},"
        f" lag {advice.lag:,}; {advice.records_in_s:,.0f} records/s written, {advice.records_read_s:,.0f} read"
    )
    for line in advice.lines:
        click.echo(line)


# -- seek ------------------------------------------------------------------------------------------


def parse_target(text: str) -> tuple[str, set[int] | None]:
    """Parses TOPIC, TOPIC:PARTITION or TOPIC:0,3-5. Raises click.UsageError."""
    topic, colon, partitions_text = text.partition(":")
    indexes: set[int] = set()
    for part in partitions_text.split(",") if colon else ():
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) > 100_000:
            raise click.UsageError(f"{text!r} is not TOPIC or TOPIC:PARTITION, such as flights:0,3-5")
        indexes.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not topic:
        raise click.UsageError(f"{text!r} names no topic")
    return topic, indexes if colon else None


def refusal_text(group: "Group") -> str:
    """Explains why the offsets of a group with members cannot be moved."""
    members_text = ", ".join(
        f"{label} on {next(m.host for m in group.members if m.member_id == member_id)}"
        for member_id, label in list(member_labels(group).items())[:3]
    )
    more = f" and {len(group.members) - 3} more" if len(group.members) > 3 else ""
    return (
        f"group {group.group} has {_plural(len(group.members), 'member')} ({members_text}{more}), which would continue"
        " where they are; stop them, wait until mqd group describe shows Empty, and seek again"
    )


@command.command(
    epilog=(
        "WHERE: earliest, latest, an offset, -COUNT (that many before the end), or a TIME: @MILLISECONDS,"
        " 2026-01-31T12:00 or -15m.  TOPIC:0,3-5 names partitions."
    )
)
@options
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
@click.argument("targets", nargs=-1, metavar="[TOPIC[:PARTITION]]...")
@click.option("--to", "destination", metavar="WHERE", help="Where the group continues.")
@click.option("--shift-by", type=int, metavar="N", help="Move by N offsets: forward, or back if N is negative.")
@click.option("--execute", is_flag=True, help="Commit the new offsets.  [default: only show them]")
def seek(
    settings: Settings,
    name: str,
    targets: tuple[str, ...],
    destination: str | None,
    shift_by: int | None,
    execute: bool,
) -> None:
    """Move the committed offsets of GROUP, or the start offsets of a share group.

    This applies to all partitions in which the group has offsets, or to those of the given topics.
    Without --execute it only shows what would change.
    """
    from datetime import datetime

    from mqd.cli.broker_lookup import Cluster
    from mqd.cli.group_listing import WITHOUT_MEMBERS
    from mqd.cli.group_listing import describe as describe_group
    from mqd.cli.seeking import SPARK_PROGRESS_NOTE, alter, commit, parse_destination, plan

    if (destination is None) == (shift_by is None):
        raise click.UsageError("give --to earliest|latest|TIME|OFFSET, or --shift-by N")
    start = parse_destination(destination, datetime.now().astimezone()) if destination is not None else None
    requested = [parse_target(text) for text in targets]
    with Cluster(settings.bootstrap) as cluster:
        group = describe_group(cluster, name)
        has_members = group is not None and group.state not in WITHOUT_MEMBERS
        if has_members and execute:
            assert group is not None
            raise CliError(refusal_text(group))
        if group is None and not requested:
            raise CliError(
                f"there is no group {name}; mqd group list shows all groups. To set offsets"
                " for a new group, name the topics"
            )
        is_share = group is not None and group.type == "share"
        moves = plan(cluster, name, requested, start, shift_by or 0, is_share)
        failed = (alter if is_share else commit)(cluster, name, moves) if execute else {}
    is_spark_progress = any(move.is_spark_progress for move in moves)
    if settings.json:
        emit_json(
            {
                "group": name,
                "executed": execute,
                "streaming_query": is_spark_progress,
                "partitions": [
                    {
                        "topic": move.topic,
                        "partition": move.partition,
                        "old_offset": move.old,
                        "new_offset": move.new,
                        "note": move.note or None,
                        "error": failed.get((move.topic, move.partition)),
                    }
                    for move in moves
                ],
            }
        )
    else:
        _show_moves(name, moves, failed, execute)
    if is_spark_progress:
        error_line(SPARK_PROGRESS_NOTE.format(group=name))
    if has_members and group is not None:
        error_line(f"--execute would be refused now: {refusal_text(group)}")
    if failed:
        raise CliError(
            f"{len(failed)} of {len(moves)} offsets were not committed: {next(iter(failed.values()))}", EXIT_FAILED
        )


def _show_moves(name: str, moves: list[Any], failed: dict[Any, str], execute: bool) -> None:
    rows = []
    for move in moves:
        moved = (
            "-"
            if move.old is None or move.new is None
            else f"{move.new - move.old:+d}"
            if move.new != move.old
            else "0"
        )
        old, new = ("-" if value is None else value for value in (move.old, move.new))
        rows.append(
            (move.topic, move.partition, old, new, moved, failed.get((move.topic, move.partition)) or move.note)
        )
    emit_table(("TOPIC", "PARTITION", "OLD OFFSET", "NEW OFFSET", "MOVED", ""), rows)
    moved_count = sum(1 for move in moves if move.new is not None and move.new != move.old)
    if execute:
        committed_count = sum(1 for move in moves if move.new is not None) - len(failed)
        click.echo(f"group {name}: {_plural(committed_count, 'offset')} committed")
    else:
        click.echo(f"nothing was changed; --execute would move {_plural(moved_count, 'offset')} of group {name}")


# -- delete-offsets --------------------------------------------------------------------------------


@command.command("delete-offsets")
@options
@click.argument("name", metavar="GROUP", shell_complete=complete_group)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--execute", is_flag=True, help="Delete them.  [default: only show them]")
def delete_offsets(settings: Settings, name: str, topics: tuple[str, ...], execute: bool) -> None:
    """Delete the start offsets of share group GROUP in TOPIC: GROUP then begins there like a new
    group.

    Shows what would be deleted; --execute deletes it. Refused if the group has members.
    """
    from mqd.cli import share_groups
    from mqd.cli.broker_lookup import Cluster
    from mqd.cli.group_listing import SHARE, WITHOUT_MEMBERS, explain, must_describe

    with Cluster(settings.bootstrap) as cluster:
        group = must_describe(cluster, name)
        if group.type != SHARE:
            raise CliError(f"group {name} is not a share group; mqd group delete deletes it with its offsets")
        if group.state not in WITHOUT_MEMBERS and execute:
            raise CliError(refusal_text(group))
        start_offsets = {
            partition: position
            for partition, position in share_groups.offsets(cluster, name).items()
            if partition[0] in topics
        }
        errors = share_groups.delete_offsets(cluster, name, dict.fromkeys(topics)) if execute else {}
    failed = {topic: explain(error) for topic, error in errors.items() if error}
    if settings.json:
        emit_json(
            {
                "group": name,
                "executed": execute,
                "partitions": [
                    {"topic": topic, "partition": index, "start_offset": position.offset, "error": failed.get(topic)}
                    for (topic, index), position in sorted(start_offsets.items())
                ],
            }
        )
    else:
        rows = [
            (topic, index, position.offset, failed.get(topic, ""))
            for (topic, index), position in sorted(start_offsets.items())
        ]
        emit_table(("TOPIC", "PARTITION", "START", ""), rows)
        if not execute:
            click.echo(f"nothing was changed; --execute would delete {_plural(len(rows), 'offset')} of group {name}")
    if failed:
        raise CliError("; ".join(f"topic {topic}: {reason}" for topic, reason in failed.items()))
