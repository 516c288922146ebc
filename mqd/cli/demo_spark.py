"""`mqd demo-spark`: the demo's flights flow on through Spark. Delays per airport and hour, live, into a topic and into Parquet; checked, and drawn at the end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mqd.cli.common import EXIT_FAILED, EXIT_USAGE, CliError, Settings, emit_json, options
from mqd.cli.demo import TOPIC, Broker, Check, Progress, create_topic, encode_flights, flights_file, on_terminate, produce, read_flights

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

DELAYS = "delays"
SCHEMA = "origin STRING, dep_delay INT, time_hour TIMESTAMP"
MEASURES = {"flights": "count(*)", "delayed": "count_if(dep_delay > 15)", "mean_delay": "avg(dep_delay)", "p95_delay": "percentile_approx(dep_delay, 0.95)"}
LATE = "2 days"
"""How far apart the event times of two partitions may be when a batch begins."""
AFTER_ALL = '{"origin":null,"dep_delay":null,"time_hour":"2014-02-01T00:00:00Z"}'
"""Moves the watermark past the last flight, so that the last windows are told, too."""


@click.command("demo-spark")
@options
@click.option("--records", "limit", type=click.IntRange(1), help="Only so many flights.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), default="delays.png", show_default=True, help="Where the picture goes.")
def command(settings: Settings, limit: int | None, picture: Path) -> int:
    """Stream 336,776 real flights through a broker and Spark: delays per airport and hour, into a topic and Parquet, and a picture of them."""
    from mqd.spark.pipelines.running import explained
    from mqd.spark.pipelines.session import session
    from mqd.spark.pipelines.settings import SettingsError

    signal.signal(signal.SIGTERM, on_terminate)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(not settings.json))
        flights = sorted(read_flights(flights_file(), limit), key=lambda flight: flight["time_hour"])
        progress.say("starting a broker and Spark ...")
        broker = stack.enter_context(Broker())
        create_topic(broker.bootstrap)
        create_topic(broker.bootstrap, DELAYS, 1)
        started = time.monotonic()
        try:
            spark = session("mqd-demo", "local[*]", {"spark.sql.session.timeZone": "UTC"})
        except SettingsError as error:
            raise CliError(str(error), EXIT_USAGE) from None
        stack.callback(spark.stop)
        progress.say(f"Spark is there after {time.monotonic() - started:.1f} s; {len(flights):,} flights, in the order of their hours")
        try:
            rows, told = _through(spark, broker, flights, progress)
        except CliError:
            raise
        except Exception as error:
            raise CliError(explained(error)) from error
    checks = verdict(flights, rows, told)
    drawn = draw(rows, picture)
    passed = all(check.passed for check in checks)
    if settings.json:
        emit_json({"passed": passed, "picture": str(picture) if drawn else None, "checks": [msgspec.to_builtins(check) for check in checks]})
        return 0 if passed else EXIT_FAILED
    for check in checks:
        click.echo(f"  {'ok    ' if check.passed else 'FAILED'}  {check.name:<8} {check.detail}")
    click.echo(f"\n{picture}: delays by airport and hour" if drawn else "\nno picture: matplotlib is missing (pip install matplotlib)")
    return 0 if passed else EXIT_FAILED


def _through(spark: SparkSession, broker: Broker, flights: list[dict[str, Any]], progress: Progress) -> tuple[list[Row], list[dict[str, Any]]]:
    """The windows that Parquet has in the end, and those that the topic has."""
    from mqd.spark.pipelines import running
    from mqd.spark.pipelines.settings import Aggregate, Sink, Source, Value

    place = str(broker.directory)
    common = {"source": Source(topics=[TOPIC]), "value": Value(schema=SCHEMA), "time": "time_hour", "window": "1 hour", "watermark": LATE, "by": ["origin"], "measures": MEASURES}
    pipelines = [
        Aggregate(name="demo-topic", bootstrap=broker.bootstrap, trigger="0 seconds", checkpoint=f"{place}/topic", sink=Sink(topic=DELAYS, key="origin"), **common),
        Aggregate(name="demo-parquet", bootstrap=broker.bootstrap, trigger="0 seconds", checkpoint=f"{place}/parquet", sink=Sink(path=f"{place}/delays"), **common),
    ]
    queries = [running.start(spark, pipeline) for pipeline in pipelines]
    sender = threading.Thread(target=produce, args=(broker.bootstrap, [*encode_flights(flights), (None, AFTER_ALL.encode())], progress))
    sender.start()
    sender.join()
    for query in queries:
        query.processAllAvailable()  # one batch more than the records need: the one that tells the last windows
        progress.say(f"  {query.name}: {sum(one['numInputRows'] for one in query.recentProgress):,} records in {query.lastProgress['batchId'] + 1} batches")
        query.stop()
    rows = spark.read.parquet(f"{place}/delays").where("origin IS NOT NULL").orderBy("start", "origin").collect()
    values = spark.read.format(running.FORMAT).option("kafka.bootstrap.servers", broker.bootstrap).option("subscribe", DELAYS).load().selectExpr("CAST(value AS STRING)").collect()
    return rows, [window for window in (msgspec.json.decode(row[0]) for row in values) if window["origin"] is not None]


def verdict(flights: list[dict[str, Any]], rows: list[Row], told: list[dict[str, Any]]) -> list[Check]:
    """What came out of Spark against what went in."""
    wanted: dict[tuple[str, str], int] = defaultdict(int)
    for flight in flights:
        wanted[flight["origin"], flight["time_hour"][:13]] += 1
    found = {(row.origin, row.start.isoformat()[:13]): row.flights for row in rows}
    topic = {(window["origin"], window["start"][:13]): window["flights"] for window in told}
    wrong = sum(wanted[key] != found.get(key) for key in wanted) + sum(key not in wanted for key in found)
    return [
        Check("flights", sum(found.values()) == len(flights), f"{sum(found.values()):,} of {len(flights):,} flights are in a window"),
        Check("windows", not wrong and len(rows) == len(found), f"{len(rows):,} airports' hours, each told once, each with its flights" if not wrong else f"{wrong:,} airports' hours are wrong"),
        Check("topic", topic == found and len(told) == len(found), f"the topic {DELAYS} has the same {len(told):,} windows as Parquet"),
    ]


def draw(rows: list[Row], picture: Path) -> bool:
    """Mean delay by hour of the day, and the share of delayed flights by month, for each airport. False: there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_hour, by_month) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for origin in sorted({row.origin for row in rows}):
        mine = [row for row in rows if row.origin == origin]
        hours, months = defaultdict(lambda: [0.0, 0]), defaultdict(lambda: [0, 0])
        for row in mine:
            if row.mean_delay is not None:
                hours[(row.start.hour - 5) % 24][0] += row.mean_delay * row.flights  # New York's clock, without its summer
                hours[(row.start.hour - 5) % 24][1] += row.flights
            months[row.start.month][0] += row.delayed
            months[row.start.month][1] += row.flights
        by_hour.plot(sorted(hours), [hours[hour][0] / hours[hour][1] for hour in sorted(hours)], marker=".", label=origin)
        by_month.plot(sorted(months), [100 * months[month][0] / months[month][1] for month in sorted(months)], marker=".", label=origin)
    by_hour.set(title="Mean delay of a departure", xlabel="hour of the day (UTC-5)", ylabel="minutes")
    by_month.set(title="Departures more than 15 minutes late", xlabel="month of 2013", ylabel="%")
    for axis in (by_hour, by_month):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True
