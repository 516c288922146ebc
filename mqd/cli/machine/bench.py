"""`mqd bench disk`."""

from __future__ import annotations

from pathlib import Path

import click

from mqd.base.paths import default_data_dir
from mqd.cli.common import CliError, emit_json
from mqd.cli.machine import disk, storage


@click.group(help="Measure this machine before a broker runs on it.")
def command() -> None:
    pass


@command.command("disk", short_help="Measure how fast a disk flushes, writes and reads.")
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--size",
    "size_mib",
    default=256,
    show_default=True,
    type=click.IntRange(4, 1 << 20),
    metavar="MIB",
    help="Space that the measurement uses.",
)
@click.option(
    "--seconds",
    default=8.0,
    show_default=True,
    type=click.FloatRange(0.2, 600),
    help="Maximum duration of the measurement.",
)
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def disk_(directory: Path | None, size_mib: int, seconds: float, output_format: str) -> None:
    """Measure how fast the disk of DIRECTORY flushes, writes and reads. With acks=all, producers wait
    for flushes.

    DIRECTORY defaults to the data directory of `mqd up`, or to its nearest existing parent. The
    measurement leaves no file behind.
    """
    target = directory or default_data_dir()
    while directory is None and not target.exists():
        target = target.parent
    if not target.is_dir():
        raise CliError(f"{target} is not a directory: give one on the disk to measure")
    disk.check_space(target, size_mib * disk.MIB)
    file_system = storage.file_system_of(Path("/"), target.resolve())
    figures = disk.measure(target, size_mib * disk.MIB, seconds)
    kind = file_system.kind if file_system else "an unknown file system"
    advice = disk.advice(figures, kind)
    if output_format == "json":
        emit_json(
            {
                "directory": str(target),
                "file_system": kind,
                "append_and_flush": [flushes._asdict() for flushes in (figures.single, figures.group)],
                "write_bytes_per_s": figures.write_bytes_per_s,
                "read_bytes_per_s": figures.read_bytes_per_s,
                "read_from_memory": figures.is_cached,
                "advice": advice,
            }
        )
        return
    click.echo(f"{target} ({kind})")
    labelled_figures = disk.labelled_figures(figures)
    width = max(len(label) for label, _ in labelled_figures)
    for label, text in labelled_figures:
        click.echo(f"  {label.ljust(width)}  {text}")
    for line in advice:
        click.echo(line)
