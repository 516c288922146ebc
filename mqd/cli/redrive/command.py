"""`mqd queue`: redrive."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError, Settings, complete_topic, emit_json, emit_table, error_line, options
from mqd.cli.records import parse_time
from mqd.cli.redrive.plan import REASONS, Filter

if TYPE_CHECKING:
    from mqd.cli.redrive.moving import Outcome


@click.group(help="Move dead letters back to the topics they came from.")
def command() -> None:
    pass


@command.command(
    epilog="TIME: 2026-01-31T12:00, milliseconds since 1970, or -15m. It is compared with the time of the dead letter,"
    " not of the original record."
)
@options
@click.argument("topic", metavar="DEAD_LETTER_TOPIC", shell_complete=complete_topic)
@click.option("--group", default="", metavar="GROUP", help="Only letters of this share group.")
@click.option("--source", default="", metavar="TOPIC", help="Only letters of records of this topic.")
@click.option(
    "--reason",
    type=click.Choice(list(REASONS)),
    help="Only letters of records that were rejected, or that exhausted their deliveries.",
)
@click.option("--since", metavar="TIME", help="Only letters written at this time or later.")
@click.option("--until", metavar="TIME", help="Only letters written before this time.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Move at most N records.")
@click.option("--rate", type=click.IntRange(1), metavar="N", help="Move at most N records a second.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
def redrive(
    settings: Settings,
    topic: str,
    group: str,
    source: str,
    reason: str | None,
    since: str | None,
    until: str | None,
    limit: int | None,
    rate: int | None,
    dry_run: bool,
) -> None:
    """Move the records of dead letters back to the topics that they came from.

    Takes the letters that are in DEAD_LETTER_TOPIC now and were not moved before. If the command is
    killed, run it again to resume; consumers with read_committed see each record moved once. Every
    share group of the source topic gets the record, not only the one that dead-lettered it.

    The cluster remembers what was moved for offsets.retention.minutes (7 days by default) after the
    last redrive with these options; after that, a redrive moves the same letters again.
    """
    from mqd.cli.redrive.moving import Redrive

    now = datetime.now().astimezone()
    letter_filter = Filter(
        group, source, reason or "", parse_time(since, now) if since else 0, parse_time(until, now) if until else 0
    )
    problem: CliError | None = None
    with Redrive(settings.bootstrap, topic, letter_filter, dry_run) as redrive_run:
        try:
            redrive_run.run(limit, rate)
        except CliError as error:  # what was moved before the error is shown first
            problem = error
    if settings.json:
        emit_json({"topic": topic, "dry_run": dry_run, "group": redrive_run.group, **_json(redrive_run.outcome)})
    elif problem is None or redrive_run.outcome.moved or redrive_run.outcome.refused:
        _show(topic, redrive_run.outcome, dry_run)
    if problem is not None:
        raise problem


def _json(outcome: "Outcome") -> dict[str, Any]:
    return {
        "moved": [
            {"topic": topic, "group": group, "message": message, "records": count}
            for (topic, group, message), count in sorted(outcome.moved.items())
        ],
        "not_moved": [
            {
                "reason": why,
                "letters": count,
                "first": dict(zip(("partition", "offset"), outcome.first_refused[why], strict=True)),
            }
            for why, count in sorted(outcome.refused.items())
        ],
        "moved_before": outcome.moved_before,
        "not_selected": outcome.not_selected,
    }


def _show(topic: str, outcome: "Outcome", is_dry_run: bool) -> None:
    if outcome.moved:
        rows = [(*target, count) for target, count in sorted(outcome.moved.items())]
        emit_table(("TOPIC", "GROUP", "REASON", "RECORDS"), rows)
    count = outcome.moved.total()
    records = f"{count} record{'s' * (count != 1)}"
    click.echo(f"nothing was changed; {records} would be moved" if is_dry_run else f"{records} moved")
    for why, letters in sorted(outcome.refused.items()):
        index, offset = outcome.first_refused[why]
        error_line(f"{letters} not moved, {why} ({'first at ' * (letters > 1)}{topic}-{index} offset {offset})")
