"""`python -m perf picture`: the README's picture of a broker at work, docs/images/running.svg.

Every line is the real output of a real command. The broker listens on 9092, as in the README;
raises ValueError if the port is in use.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from perf.loading import ROOT

PICTURE = ROOT / "docs" / "images" / "running.svg"
COLUMNS = 92
COMMANDS = (
    "mqd topic create readings -p 6",
    "seq 1 100000 | mqd produce readings",
    "mqd consume readings -n 3 -f '%p %o %v\\n' -o beginning",
    "mqd topic describe readings",
    "mqd status",
)
# rich's own, without the web font that it would load
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


@contextlib.contextmanager
def _broker(data_dir: Path) -> Iterator[list[str]]:
    """Runs a broker. Yields the lines that `mqd up` has printed when it is ready."""
    command = [sys.executable, "-m", "mqd.cli.main", "up", "--data-dir", str(data_dir), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("mqd ready"):
                break
        else:
            raise ValueError(f"the broker did not start: {process.stderr.read().strip()}")
        yield lines
    finally:
        process.terminate()
        process.communicate()


def _run(command: str, data_dir: Path) -> list[str]:
    """The command's output on both streams; MQD_DATA_DIR is the broker's directory."""
    environment = {**os.environ, "MQD_DATA_DIR": str(data_dir), "COLUMNS": str(COLUMNS)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=60
    )
    if done.returncode:
        raise ValueError(f"{shlex.quote(command)} failed: {done.stdout.strip()}")
    return done.stdout.rstrip().splitlines()


def draw(path: Path = PICTURE) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")

    def show(command: str, lines: list[str]) -> None:
        console.print(Text("$ ", "bold green") + Text(command, "bold"))
        for line in lines:
            console.print(Text(line[:COLUMNS], "grey78"))

    with tempfile.TemporaryDirectory(prefix="mqd-picture-") as directory:
        data_dir = Path(directory) / "data"
        with _broker(data_dir) as lines:
            show("mqd up &", [line.replace(str(data_dir), "~/.local/share/mqd") for line in lines])
            for command in COMMANDS:
                shown = [line.replace(str(data_dir), "~/.local/share/mqd") for line in _run(command, data_dir)]
                show(command, shown)
    svg = console.export_svg(title="mqd", code_format=FORMAT, unique_id="mqd")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
