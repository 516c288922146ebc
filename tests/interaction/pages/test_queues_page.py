"""docs/queues.md: its programs and commands are extracted from the page, run in its order, and
print the output shown; the job runner of examples/jobs survives kills of its workers.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.broker import Broker
from tests.preloaded import PRELOADED

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "queues.md").read_text()
PROGRAMS = {match[1]: match[2] for match in re.finditer(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)}
LOCK_S = 5  # with a shorter one a slow machine would be late with a renewal


def commands(section: str) -> list[str]:
    text = PAGE[PAGE.index(f"\n## {section}\n") :]
    found = re.findall(r"```sh\n(.*?)```", text[: text.index("\n## ", 5)], re.DOTALL)
    return [line for block in found for line in block.replace("\\\n", "").splitlines()]


def type_in(broker: Broker, *lines: str) -> str:
    """Runs commands as typed and returns their output. The test's locks are shorter than the
    page's.
    """
    printed = ""
    for line in lines:
        words = shlex.split(line.replace("duration.ms=15000", f"duration.ms={1000 * LOCK_S}"))
        assert words[0] == "mqd"
        done = PRELOADED.run(*words[1:], environment={**os.environ, "MQD_BOOTSTRAP": broker.bootstrap})
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed += done.stdout
    return printed


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {
        "group.share.min.record.lock.duration.ms": "1000",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "super.users": "User:ANONYMOUS;User:root",
    }
    with Broker(tmp_path_factory.mktemp("queues"), config=config) as running:
        type_in(running, *commands("Set up"))
        yield running


@pytest.fixture
def run(broker: Broker) -> Callable[[str], str]:
    """run(program) -> its output. The queue is emptied before each program, as on the page."""

    def execute(name: str) -> str:
        program = (
            PROGRAMS[name].replace("127.0.0.1:9092", broker.bootstrap).replace("LOCK_S = 15 ", f"LOCK_S = {LOCK_S} ")
        )
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    return execute


def purge(broker: Broker) -> None:
    type_in(broker, commands("Purge and replay")[0])


def test_the_page_has_the_programs() -> None:
    assert list(PROGRAMS) == [
        "send.py",
        "worker.py",
        "one_at_a_time.py",
        "slow_job.py",
        "retry.py",
        "in_order.py",
        "priorities.py",
        "failed_jobs.py",
    ]


def test_sending_and_working(broker: Broker, run: Callable[[str], str]) -> None:
    assert run("send.py") == "100 jobs sent\n"
    assert run("worker.py") == "99 accepted, 1 rejected, 1 released\n"
    described = type_in(broker, *commands("How much is left"))
    assert "jobs" in described
    latest, earliest = commands("Purge and replay")
    type_in(broker, earliest)
    assert run("one_at_a_time.py") == "100 jobs, one at a time\n", "replayed: all, also the rejected one"
    type_in(broker, latest)


def test_a_slow_job_keeps_its_lock(broker: Broker, run: Callable[[str], str]) -> None:
    purge(broker)
    type_in(broker, *commands("Slow jobs"))
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("jobs", "slow")
    assert producer.flush(60) == 0
    assert run("slow_job.py") == "done, its lock was held\n"


def test_retries_are_delayed(broker: Broker, run: Callable[[str], str]) -> None:
    purge(broker)
    type_in(broker, *commands("Retry with a backoff"))
    came = re.fullmatch(r"again after (\d+) s and (\d+) s\n", run("retry.py"))
    assert came and int(came[1]) >= 1 and int(came[2]) >= 2, "not before: a slow machine is later"


def test_jobs_of_a_key_are_in_order(broker: Broker, run: Callable[[str], str]) -> None:
    purge(broker)
    type_in(broker, "mqd config set group/workers share.retry.backoff.ms=0", *commands("Order by key"))
    expected = [[f"{account}-{number}" for number in range(4)] for account in ("anna", "bert")]
    assert run("in_order.py") == f"{expected[0]}\n{expected[1]}\n"


def test_urgent_jobs_come_first(broker: Broker, run: Callable[[str], str]) -> None:
    purge(broker)
    type_in(broker, *commands("Priorities"), "mqd config set group/workers share.fifo=")
    assert run("priorities.py") == "18 of the first 20 jobs are urgent\n"


def test_failed_jobs_go_to_a_dead_letter_topic(broker: Broker, run: Callable[[str], str]) -> None:
    purge(broker)
    *settings, dry_run, redrive = commands("Failed jobs")
    type_in(broker, *settings, *commands("Delete finished jobs"))
    assert run("failed_jobs.py") == "poison resize Offset rejected by client.\n"
    assert "nothing was changed; 1 record would be moved" in type_in(broker, dry_run)
    assert "1 record moved" in type_in(broker, redrive)
    assert "poison kind=resize,mqd-redriven=1" in type_in(broker, "mqd consume jobs -e -f '%s %h\\n'")
    assert "0 records moved" in type_in(broker, redrive)


def test_another_group_and_rights(broker: Broker) -> None:
    type_in(broker, *commands("The same jobs for another group"), *commands("Permissions"))
    for user, operation, resource in (("sender", "write", "topic/jobs"), ("worker", "read", "group/workers")):
        assert "allow" in type_in(broker, f"mqd acl explain {user} {operation} {resource}").lower()


# -- examples/ported -------------------------------------------------------------------------------


def ported(broker: Broker, name: str) -> str:
    """The program's output, after the set-up in its docstring."""
    program = ROOT / "examples" / "ported" / name
    docstring = ast.get_docstring(ast.parse(program.read_text())) or ""
    type_in(broker, *re.findall(r"^ +(mqd .*)$", docstring, re.MULTILINE))
    done = subprocess.run([sys.executable, program, broker.bootstrap], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_for_pika(broker: Broker) -> None:
    lines = ported(broker, "from_pika.py").splitlines()
    assert sorted(lines) == sorted(
        [*(f"{number}.png accept" for number in range(10) if number != 7), "7.png reject", "4.png release"]
    )
    assert "7.png" in type_in(broker, "mqd consume dlq.images -e -n 1 -f '%s\\n'")


def test_a_program_for_sqs(broker: Broker) -> None:
    assert ported(broker, "from_sqs.py") == "anna [0, 1, 2, 3, 4, 5]\nbert [0, 1, 2, 3, 4, 5]\n"


def test_a_program_for_redis_streams(broker: Broker) -> None:
    taken, *counts = ported(broker, "from_redis.py").splitlines()
    assert re.fullmatch(r"[1-9]\d* records taken and not acknowledged", taken)
    assert counts == ["/0 10", "/1 10", "/2 10"]


# -- examples/jobs ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_job_runner_while_its_workers_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/jobs/demo.py", "--jobs", "300", "--kills", "8", "--picture", "queue.svg"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every job has the right result" in done.stdout and "8 workers killed" in done.stdout
    table = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if re.match(r"[a-z]+ +\d", line)}
    assert {"square", "urgent", "later", "slow", "flaky", "poison"} == table.keys()
    assert int(table["poison"][2]) > 0 and table["poison"][:2] == ["0", "0"], "given up, none done"
    assert sum(int(row[3]) for row in table.values()) > 0, "some job was interrupted by a kill"
    picture = xml.etree.ElementTree.parse(tmp_path / "queue.svg")
    bars = [one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    assert len(bars) == sum(int(row[4]) for row in table.values()), "a bar for each attempt"
