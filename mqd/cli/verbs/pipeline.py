"""`mqd pipeline`: runs a pipeline on Spark."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import click
import msgspec

from mqd.cli.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CliError,
    OutputClosedError,
    error_line,
    print_line,
    stop_when_interrupted,
)


@click.group("pipeline", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Archive, replay, aggregate, deduplicate, route and join topics with Spark (docs/spark.md)."""


@command.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-b",
    "--bootstrap",
    metavar="HOST:PORT[,...]",
    help="Broker to connect to.  [default: the file's, or env MQD_BOOTSTRAP, or 127.0.0.1:9092]",
)
@click.option("--master", metavar="URL", help="Spark master.  [default: the file's, or local[*]]")
@click.option("--once", is_flag=True, help="Process all available records, then end.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    help="Output format of the progress.  [default: text]",
)
@click.pass_context
def run(
    ctx: click.Context, file: Path, bootstrap: str | None, master: str | None, once: bool, output_format: str | None
) -> int:
    """Run the pipeline that FILE.toml describes, until it ends or is interrupted. The next run
    resumes where it stopped.

    The suffix .toml may be omitted. Progress goes to stdout, a line for each batch.
    """
    from mqd.spark.pipelines.settings import ONCE, SettingsError, load

    root_options = ctx.find_root().obj or {}  # options may also come before the verb
    as_json = (output_format or root_options.get("output_format")) == "json"
    path = file if file.exists() else file.with_name(f"{file.name}.toml")
    overrides = {
        "bootstrap": bootstrap or root_options.get("bootstrap"),
        "master": master,
        "trigger": ONCE if once else None,
    }
    try:
        pipeline = load(path if path.exists() else file, overrides, {"bootstrap": os.environ.get("MQD_BOOTSTRAP")})
        from mqd.spark.pipelines.running import Progress, ReplayStoppedError, explain_error
        from mqd.spark.pipelines.running import run as run_pipeline
        from mqd.spark.pipelines.session import session

        error_line(f"{pipeline.name}: starting Spark on {pipeline.master}")
        spark = session(pipeline.name, pipeline.master, pipeline.spark)
    except SettingsError as error:
        raise CliError(str(error), EXIT_USAGE) from None

    def report(progress: Progress) -> None:
        print_line(msgspec.json.encode(progress).decode() if as_json else _progress_line(progress))

    stop = threading.Event()
    stop_when_interrupted(stop)
    try:
        is_done = run_pipeline(spark, pipeline, report, stop)
    except OutputClosedError:
        raise
    except ReplayStoppedError as error:
        raise CliError(f"{pipeline.name}: {explain_error(error)}", EXIT_INTERRUPTED) from None
    except Exception as error:
        raise CliError(f"{pipeline.name}: {explain_error(error)}", EXIT_FAILED) from error
    finally:
        spark.stop()
    error_line(f"{pipeline.name}: {'done' if is_done else 'stopped; the next run resumes from its checkpoint'}")
    return 0


def _progress_line(progress) -> str:
    behind = f", {progress.behind:,} behind" if progress.behind > 0 else ""
    return (
        f"batch {progress.batch}: {progress.rows:,} records, {progress.rows_per_s:,.0f}/s, {progress.took_ms:,}"
        f" ms{behind}"
    )
