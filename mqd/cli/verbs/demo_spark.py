"""`mqd demo-spark`: streams the demo's flights through Spark, too. Spark computes the delays per
airport and hour, live, into a topic and into Parquet. At the end, the results are checked and
drawn.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
import msgspec

from mqd.cli.common import EXIT_FAILED, EXIT_USAGE, CliError, Settings, emit_json, options
from mqd.cli.verbs.demo import (
    TOPIC,
    Broker,
    Check,
    Progress,
    create_topic,
    encode_flights,
    flights_file,
    on_terminate,
    produce,
    read_flights,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

DELAYS = "delays"
SCHEMA = "origin STRING, dep_delay INT, time_hour TIMESTAMP"
MEASURES = {
    "flights": "count(*)",
    "delayed": "count_if(dep_delay > 15)",
    "mean_delay": "avg(dep_delay)",
    "p95_delay": "percentile_approx(dep_delay, 0.95)",
}
WATERMARK_DELAY = "2 days"
"""Maximum difference between the event times of two partitions when a batch begins."""
LAST_EVENT = '{"origin":null,"dep_delay":null,"time_hour":"2014-02-01T00:00:00Z"}'
"""An event that moves the watermark past the last flight, so that the last windows are emitted."""
AIRPORTS = {"EWR": "Newark", "JFK": "John F. Kennedy", "LGA": "LaGuardia"}
FLIGHTS_MIN = 100
"""The picture omits hours and months with fewer flights."""
ATTEMPTS_MAX = 5


class Window(msgspec.Struct, frozen=True):
    """An airport's flights of one hour, as read from Parquet. `mean_delay` is in minutes; None if all
    flights were cancelled.
    """

    origin: str
    start: datetime
    flights: int
    delayed: int
    mean_delay: float | None


@click.command("demo-spark")
@options
@click.option("--records", "limit", type=click.IntRange(1), help="Only this number of flights.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default="delays.png",
    show_default=True,
    help="File to write the picture to.",
)
def command(settings: Settings, limit: int | None, picture: Path) -> int:
    """Stream 336,776 real flights through a broker and Spark, which writes the delays per airport and
    hour to a topic and to Parquet. The delays are also drawn in a picture.
    """
    from mqd.spark.pipelines.running import explain_error
    from mqd.spark.pipelines.session import require_spark, session
    from mqd.spark.pipelines.settings import SettingsError

    try:
        require_spark()
    except SettingsError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    signal.signal(signal.SIGTERM, on_terminate)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(not settings.json))
        flights = sorted(read_flights(flights_file(), limit), key=lambda flight: flight["time_hour"])
        progress.show("starting a broker and Spark ...")
        broker = stack.enter_context(Broker())
        create_topic(broker.bootstrap)
        create_topic(broker.bootstrap, DELAYS, 1)
        started = time.monotonic()
        try:
            spark = session("mqd-demo", "local[*]", {"spark.sql.session.timeZone": "UTC"})
        except SettingsError as error:
            raise CliError(str(error), EXIT_USAGE) from None
        stack.callback(spark.stop)
        progress.show(
            f"Spark is ready after {time.monotonic() - started:.1f} s; {len(flights):,} flights, sorted by hour"
        )
        try:
            windows, published = _run_pipelines(spark, broker, flights, progress)
        except CliError:
            raise
        except Exception as error:
            raise CliError(explain_error(error)) from error
    checks = compare_output(flights, windows, published)
    is_drawn = draw(windows, picture)
    passed = all(check.passed for check in checks)
    if settings.json:
        emit_json(
            {
                "passed": passed,
                "picture": str(picture) if is_drawn else None,
                "checks": [msgspec.to_builtins(check) for check in checks],
            }
        )
        return 0 if passed else EXIT_FAILED
    for check in checks:
        click.echo(f"  {'ok    ' if check.passed else 'FAILED'}  {check.name:<8} {check.detail}")
    click.echo(
        f"\n{picture}: delays by airport, hour of the day and month"
        if is_drawn
        else "\nno picture: matplotlib is missing (pip install matplotlib)"
    )
    return 0 if passed else EXIT_FAILED


def _run_pipelines(
    spark: SparkSession, broker: Broker, flights: list[dict[str, Any]], progress: Progress
) -> tuple[list[Window], list[dict[str, Any]]]:
    """Returns the final windows in Parquet, and those in the topic."""
    from mqd.spark.pipelines import running
    from mqd.spark.pipelines.settings import READ_COMMITTED, Aggregate, Sink, Source, Value

    directory = str(broker.directory)
    common: dict[str, Any] = {
        "source": Source(topics=[TOPIC]),
        "value": Value(schema=SCHEMA),
        "time": "time_hour",
        "window": "1 hour",
        "watermark": WATERMARK_DELAY,
        "by": ["origin"],
        "measures": MEASURES,
    }
    pipelines = [
        Aggregate(
            name="demo-topic",
            bootstrap=broker.bootstrap,
            trigger="0 seconds",
            checkpoint=f"{directory}/topic",
            sink=Sink(topic=DELAYS, key="origin"),
            **common,
        ),
        Aggregate(
            name="demo-parquet",
            bootstrap=broker.bootstrap,
            trigger="0 seconds",
            checkpoint=f"{directory}/parquet",
            sink=Sink(path=f"{directory}/delays"),
            **common,
        ),
    ]
    queries = [running.start(spark, pipeline) for pipeline in pipelines]
    produce(broker.bootstrap, [*encode_flights(flights), (None, LAST_EVENT.encode())], progress)
    for query, pipeline in zip(queries, pipelines, strict=True):
        completed = _wait_until_complete(query, partial(running.start, spark, pipeline))
        progress.show(f"  {query.name}: complete after batch {completed.lastProgress['batchId']}")
        completed.stop()
    records = (
        spark.read.format(running.FORMAT)
        .options(**READ_COMMITTED)
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .option("subscribe", DELAYS)
        .load()
    )
    values = records.selectExpr("CAST(value AS STRING)").collect()
    return _windows(spark, f"{directory}/delays"), [
        window for window in (msgspec.json.decode(row[0]) for row in values) if window["origin"] is not None
    ]


def _wait_until_complete(query: StreamingQuery, restart: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Waits until the query has emitted all windows. If an overloaded machine makes Spark fail, the
    query continues from its checkpoint.
    """
    from pyspark.errors import StreamingQueryException

    from mqd.spark.pipelines.running import OVERLOAD_MESSAGES

    for attempts_left in reversed(range(ATTEMPTS_MAX)):
        try:
            query.processAllAvailable()  # one more batch follows the last records; it emits the last windows
            return query
        except StreamingQueryException as error:
            if not attempts_left or not any(message in str(error) for message in OVERLOAD_MESSAGES):
                raise
            query = restart()
    raise AssertionError("unreachable")


def _windows(spark: SparkSession, path: str) -> list[Window]:
    """Reads the windows in Parquet files. Reads the timestamps as seconds since the epoch, because
    Spark's timestamps become local times in Python.
    """
    rows = (
        spark.read.parquet(path)
        .where("origin IS NOT NULL")
        .orderBy("start", "origin")
        .selectExpr("origin", "unix_seconds(start) AS start", "flights", "delayed", "mean_delay")
        .collect()
    )
    return [
        Window(row.origin, datetime.fromtimestamp(row.start, UTC), row.flights, row.delayed, row.mean_delay)
        for row in rows
    ]


def compare_output(
    flights: list[dict[str, Any]], windows: list[Window], published: list[dict[str, Any]]
) -> list[Check]:
    """Compares Spark's output with its input."""
    expected: dict[tuple[str, str], int] = defaultdict(int)
    for flight in flights:
        expected[flight["origin"], flight["time_hour"][:13]] += 1
    in_parquet = {(window.origin, window.start.isoformat()[:13]): window.flights for window in windows}
    in_topic = {(record["origin"], record["start"][:13]): record["flights"] for record in published}
    wrong_count = sum(expected[key] != in_parquet.get(key) for key in expected) + len(
        in_parquet.keys() - expected.keys()
    )
    return [
        Check(
            "flights",
            sum(in_parquet.values()) == len(flights),
            f"{sum(in_parquet.values()):,} of {len(flights):,} flights are in a window",
        ),
        Check(
            "windows",
            not wrong_count and len(windows) == len(in_parquet),
            (
                f"{len(windows):,} windows (airport and hour), each reported once, each with its flights"
                if not wrong_count
                else f"{wrong_count:,} windows (airport and hour) are wrong"
            ),
        ),
        Check(
            "topic",
            in_topic == in_parquet and len(published) == len(in_parquet),
            f"the topic {DELAYS} has the same {len(published):,} windows as Parquet",
        ),
    ]


def new_york() -> tuple[tzinfo, str]:
    """The airports' time zone and its name; without daylight saving time if the machine has no time
    zone data.
    """
    try:
        return ZoneInfo("America/New_York"), "New York time"
    except ZoneInfoNotFoundError:
        return timezone(timedelta(hours=-5)), "UTC-5"


def by_hour_and_month(windows: list[Window], zone: tzinfo) -> tuple[dict[int, float], dict[int, float]]:
    """Returns hour of the day -> mean delay in minutes, and month -> percentage of flights more than
    15 minutes late. Omits hours and months with fewer than FLIGHTS_MIN flights.
    """
    hours: defaultdict[int, list[Any]] = defaultdict(lambda: [0.0, 0])
    months: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for window in windows:
        local = window.start.astimezone(zone)
        if window.mean_delay is not None:
            hours[local.hour][0] += window.mean_delay * window.flights
            hours[local.hour][1] += window.flights
        months[local.month][0] += window.delayed
        months[local.month][1] += window.flights
    return (
        {hour: minutes / count for hour, (minutes, count) in sorted(hours.items()) if count >= FLIGHTS_MIN},
        {month: 100 * late / count for month, (late, count) in sorted(months.items()) if count >= FLIGHTS_MIN},
    )


def draw(windows: list[Window], picture: Path) -> bool:
    """Draws the mean delay by hour of the day, and the share of delayed flights by month, for each
    airport. Returns False if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    zone, zone_name = new_york()
    figure, (hourly, monthly) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for origin in sorted({window.origin for window in windows}):
        hours, months = by_hour_and_month([window for window in windows if window.origin == origin], zone)
        hourly.plot(list(hours), list(hours.values()), marker=".", label=AIRPORTS.get(origin, origin))
        monthly.plot(list(months), list(months.values()), marker=".")
    hourly.set(
        title="Mean delay of a departure, minutes",
        xlabel=f"hour of the day ({zone_name})",
        xticks=range(4, 25, 2),
        xlim=(4, 24),
    )
    hourly.axhline(0, color="grey", linewidth=0.8)
    monthly.set(
        title="Departures more than 15 minutes late, %",
        xlabel="2013",
        xticks=range(1, 13),
        xticklabels=["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"],
        xlim=(0.6, 12.4),
    )
    monthly.set_ylim(bottom=0)
    for axis in (hourly, monthly):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    hourly.legend(frameon=False, loc="upper left")
    figure.suptitle(
        f"{sum(window.flights for window in windows):,} flights from New York's airports, computed by Spark from"
        " mqd topics"
    )
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True
