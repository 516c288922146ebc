"""`mqd sql`: Spark SQL over topics."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import click

from mqd.cli.common import (
    EXIT_USAGE,
    CliError,
    OutputClosedError,
    Settings,
    error_line,
    options,
    pairs,
    print_line,
    stop_when_interrupted,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS_MAX = 1000


@click.command("sql", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("query")
@click.option("--live", is_flag=True, help="Continue as records arrive, until interrupted.")
@click.option(
    "--from",
    "starting_at",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where a live query begins.",
)
@click.option(
    "--schema",
    "schemas",
    multiple=True,
    metavar="TOPIC=DDL",
    help=(
        'Fields of a topic\'s values, e.g. flights="carrier STRING, dep_delay INT".  [default: inferred from its first'
        " 1,000 values]"
    ),
)
@click.option(
    "--max-rows",
    type=click.IntRange(1),
    help="Rows to show, without --live.  [default: 1000, or all with --format json]",
)
@click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Spark master.")
@options
def command(
    settings: Settings,
    query: str,
    live: bool,
    starting_at: str,
    schemas: tuple[str, ...],
    max_rows: int | None,
    master: str,
) -> int:
    """Query topics with Spark SQL.

    Each topic is a table. The fields of its JSON values are columns; the column `record` is a struct
    of key, value, topic, partition, offset and timestamp. Put names with dots or dashes in
    backquotes.

    mqd sql "SELECT carrier, count(*) FROM flights GROUP BY carrier"
    """
    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, topic_names
    from mqd.spark.pipelines.queries import prepare_query
    from mqd.spark.pipelines.running import explain_error
    from mqd.spark.pipelines.session import session
    from mqd.spark.pipelines.settings import SettingsError

    topics = topic_names(settings.bootstrap, REQUEST_TIMEOUT_S)
    try:
        spark = session("mqd-sql", master)
    except SettingsError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    try:
        frame = prepare_query(
            spark,
            query,
            topics,
            settings.bootstrap,
            pairs(schemas, "--schema"),
            live,
            starting_at if live else "earliest",
        )
        return _follow(frame, settings.json) if live else _show(frame, settings.json, max_rows)
    except (CliError, OutputClosedError):
        raise
    except Exception as error:
        raise CliError(explain_error(error)) from error
    finally:
        spark.stop()


def _as_json_rows(frame: DataFrame) -> DataFrame:
    """One column: the rows as JSON."""
    from pyspark.sql import functions as f

    return frame.select(f.to_json(f.struct("*"), {"ignoreNullFields": "false"}))


def _show(frame: DataFrame, as_json: bool, max_rows: int | None) -> int:
    """Prints the rows. If `max_rows` is None, prints _ROWS_MAX rows as a table, or all rows as JSON.
    Prints a note on stderr if there are more rows.
    """
    if as_json and max_rows is None:
        for row in _as_json_rows(frame).toLocalIterator():
            print_line(row[0])
        return 0
    row_limit = max_rows or _ROWS_MAX
    rows = (_as_json_rows(frame) if as_json else frame).limit(row_limit + 1).collect()
    if as_json:
        for row in rows[:row_limit]:
            print_line(row[0])
    else:
        _print_table(frame.columns, rows[:row_limit])
    if len(rows) > row_limit:
        error_line(f"only the first {row_limit} rows are shown; to show more, use --max-rows")
    return 0


def _follow(frame: DataFrame, as_json: bool) -> int:
    from pyspark.errors import AnalysisException

    stop, output_closed = threading.Event(), threading.Event()

    def show(batch: DataFrame, _number: int) -> None:
        try:
            if as_json:
                for line in batch.toJSON().toLocalIterator():
                    print_line(line)
            elif rows := batch.collect():
                _print_table(batch.columns, rows)
            sys.stdout.flush()
        except (OutputClosedError, BrokenPipeError):  # if raised here, the error would make the query fail
            output_closed.set()
            stop.set()

    def start(mode: str):
        return frame.writeStream.outputMode(mode).foreachBatch(show).start()

    try:
        query = start("update")  # an aggregation emits rows as they change
    except AnalysisException:
        query = start("append")
    stop_when_interrupted(stop)
    try:
        while not query.awaitTermination(0.5) and not stop.is_set():
            pass
    finally:
        query.stop()
    if output_closed.is_set():
        raise OutputClosedError
    return 0


def _print_table(columns: list[str], rows: list) -> None:
    """Raises OutputClosedError. Writes the table with print_line(), because rich's Console,
    in any thread, raises SystemExit when the pipe is closed.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*["-" if cell is None else str(cell) for cell in row])
    console = Console(soft_wrap=True)
    with console.capture() as captured:
        console.print(table)
    print_line(captured.get().removesuffix("\n"))
