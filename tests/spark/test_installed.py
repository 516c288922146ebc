"""mqd as installed by users: a wheel, with PySpark, in a separate virtual environment, without this
tree on any path. Every shell command of docs/spark.md is run literally in it, in the page's order.

Slow: the wheels are compiled and PySpark is half a gigabyte. Skipped, with pip's message, where
there is no package index.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.client_reading import read_all
from tests.packages import building
from tests.spark.conftest import why_not_java
from tests.spark.support import new_topic, produce

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text()
# one more command requires another test
INSTALL, PIPELINE, INSTALL_DECLARATIVE, DECLARATIVE, SQL = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
LIMIT_S = 900  # bounds a hang
PATHS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "VIRTUAL_ENV",
    "MQD_BOOTSTRAP",
)
COUNT = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
print(spark.read.format("mqd").option("kafka.bootstrap.servers", "%s").option("subscribe", "flights").load().count())
import mqd
print(mqd.__file__)
"""


class Installed:
    """`run` runs a shell command in `place`, which contains only the user's files: those of the
    page.
    """

    def __init__(self, place: Path, broker: Broker) -> None:
        self.place, self.venv = place, place / "venv"
        self.environment = {name: value for name, value in os.environ.items() if name not in PATHS} | {
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "MQD_BOOTSTRAP": broker.bootstrap,
            "PIP_CONSTRAINT": str(place / "constraints"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "CC": "no-compiler",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-euc", command],
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """Returns its output. AssertionError when it fails or takes too long."""
        with self.start(command) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{command}: {process.returncode}\n{output}"
        return output


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("installed-broker")) as broker:
        new_topic(broker, 2, "flights")
        produce(
            broker,
            "flights",
            [
                {
                    "value": json.dumps({"carrier": "UA", "origin": ("EWR", "JFK")[number % 2], "dep_delay": number}),
                    "key": f"N{number}",
                }
                for number in range(50)
            ],
        )
        yield broker


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, flights: Broker) -> Installed:
    """pip uses the published wheel for mqd; the page's first command has installed it, without a
    compiler.
    """
    reason = why_not_java()
    if reason:
        pytest.skip(f"Spark cannot run here: {reason}")
    place = tmp_path_factory.mktemp("installed")
    here = Installed(place, flights)
    (place / "constraints").write_text("")
    subprocess.run([sys.executable, "-m", "venv", str(here.venv)], check=True, timeout=LIMIT_S)
    try:
        here.run("python -m pip install --quiet --upgrade pip")
    except AssertionError as error:
        pytest.skip(f"nothing can be installed here: {str(error).strip().splitlines()[-1]}")
    wheel = building.wheel(os.uname().machine)
    (place / "constraints").write_text(f"mqd @ {wheel.as_uri()}\n")
    here.run(INSTALL)
    return here


def test_spark_finds_the_format_in_an_installed_wheel(installed: Installed, flights: Broker) -> None:
    (installed.place / "count.py").write_text(COUNT % flights.bootstrap)
    *_, count, file = installed.run("python count.py").splitlines()
    assert (count, Path(file).is_relative_to(installed.venv)) == ("50", True)


def test_a_pipeline_of_the_page(installed: Installed) -> None:
    """It runs until it is interrupted, so the test waits for its first batch."""
    (block,) = re.findall(r"^```toml\n# archive-flights.toml\n(.*?)^```$", PAGE, re.M | re.S)
    (installed.place / "archive-flights.toml").write_text(block)
    with installed.start(f"exec {PIPELINE}") as process:
        try:
            assert process.stdout is not None
            output = [process.stdout.readline(), process.stdout.readline()]
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert output[0] == "mqd: archive-flights: starting Spark on local[*]\n" and re.match(
        r"batch \d+: 50 records, ", output[1]
    ), [*output, rest]
    assert (process.returncode, rest) == (
        0,
        "mqd: archive-flights: stopped; started again it continues from its checkpoint\n",
    )


def test_sql_of_the_page(installed: Installed) -> None:
    assert [line.split() for line in sorted(installed.run(SQL).splitlines())] == [
        ["EWR", "25"],
        ["JFK", "25"],
        ["origin", "flights"],
    ]


def test_the_declarative_pipeline_adds_new_records_when_it_is_run_again(installed: Installed, flights: Broker) -> None:
    shutil.copytree(ROOT / "examples", installed.place / "examples")
    installed.run(INSTALL_DECLARATIVE)
    installed.run(DECLARATIVE)
    assert len(read_all(flights, "flights-good", 50)) == 50
    produce(
        flights,
        "flights",
        [
            {"value": "no json", "key": "broken", "headers": [("from", b"elsewhere")]},
            {"value": json.dumps({"carrier": "UA", "origin": "LGA", "dep_delay": 7}), "key": "N50"},
        ],
    )
    installed.run(DECLARATIVE)
    # the second brings it into the table, and perhaps no further: Spark begins to read the table
    # before it is written
    installed.run(DECLARATIVE)
    good = read_all(flights, "flights-good", 51)
    assert sorted(json.loads(message.value())["dep_delay"] for message in good) == sorted([*range(50), 7]) and {
        message.key() for message in good
    } == {b"EWR", b"JFK", b"LGA"}
    (dead,) = read_all(flights, "flights-dead", 1)
    assert (dead.key(), dead.value()) == (b"broken", b"no json")
    assert dead.headers() == [
        ("from", b"elsewhere"),
        ("mqd.reason", b"the value is not JSON of a flight"),
        ("mqd.from", b"flights-0@50"),
    ]
    assert list((installed.place / "examples/declarative/tables/flight_records").glob("*.parquet"))
