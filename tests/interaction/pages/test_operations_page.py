"""docs/operations.md (a cluster of three brokers, a fourth, draining, a rolling restart, a lost
host), docs/security.md (joining by invitation, rotating certificates and the key, adding TLS, users
and rights to a running cluster), and the README's first steps. They are run literally, the clusters
under load (operations_run.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.interaction.pages.operations_run import DOCS, READY, Block, blocks, holds

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    "On one machine, to try it",
    "A fourth broker, under load",
    "Removing a broker",
    "Upgrading, one broker at a time",
    "One host is lost",
)


def own_network() -> list[str]:
    """The command prefix that runs a command in its own network namespace. Skips the test where
    that is not permitted.
    """
    for words in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        try:
            if (
                subprocess.run([*words, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=20).returncode
                == 0
            ):
                return words
        except OSError:
            break
    pytest.skip("a network namespace cannot be made here (unshare --net, with ip of iproute2)")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "chapter", "checked"),
    [
        ("operations.md", "A cluster", True),
        ("security.md", "More hosts", True),
        ("security.md", "A running cluster", True),
        ("../README.md", "Two commands", False),
    ],
)
def test_the_pages_run_as_written_and_no_record_is_lost(tmp_path: Path, page: str, chapter: str, checked: bool) -> None:
    """With a home directory of usual length: with a longer path, sockets and locks would be
    elsewhere than on the page.
    """
    message = tmp_path / "said"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQD_")}
    with (
        message.open("w") as output,
        tempfile.TemporaryDirectory(prefix="mqd-", dir="/tmp", ignore_cleanup_errors=True) as home,
    ):
        done = subprocess.run(
            [*own_network(), sys.executable, "-m", "tests.interaction.pages.operations_run", home, page, chapter],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=850,
        )
    assert done.returncode == 0, message.read_text()[-6000:]
    said = message.read_text()
    assert ("\nchecked " in said) == checked and "No such file" not in said


def test_every_page_has_commands_and_shows_their_output() -> None:
    found = list(blocks((DOCS / "operations.md").read_text(), "A cluster"))
    assert {block.section for block in found} >= set(PAGES)
    for name in PAGES:
        own = [block for block in found if block.section == name]
        assert any(block.shown for block in own), f"{name} shows nothing that is printed"
    assert [
        command
        for block in found
        for command in block.commands
        if command.startswith("mqd topic create flights --partitions 6 --replication-factor 3")
    ]


def test_make_cluster_runs_the_command_of_the_pages() -> None:
    assert "cluster: venv\n\t$(BIN)/python -m mqd.cli.main cluster local\n" in (ROOT / "Makefile").read_text()
    assert set(READY) == {"make cluster", "mqd cluster local", "mqd up", "mqd cluster invite"}


def test_examples_of_the_page_are_compared_without_numbers_and_ids() -> None:
    printed = (
        "cluster -ijtVf8GK2sod-zHNQ1h6g\nvoters: 1, 2, 3; the quorum can lose 1 of them\n"
        "NODE  ADDRESS\n   1  127.0.0.1:9092\n"
    )
    assert holds(("cluster 4ijtVf8GK2sod-zHNQ1h6X", "...", "NODE ADDRESS", "2 127.0.0.2:9092"), printed) == ""
    assert (
        holds(("NODE ADDRESS", "voters: 1, 2, 3; the quorum can lose 1 of them"), printed)
        == "voters: 1, 2, 3; the quorum can lose 1 of them"
    ), "in this order"
    assert holds(("voters: 1, 2; the quorum can lose 1 of them",), printed)
    assert list(
        blocks(
            "\n## A cluster\n\n### One\n\n```sh\na\nb\n```\n\n```text\nc\n```\n\n```\nnot run\n```\n\n## Next\n",
            "A cluster",
        )
    ) == [Block("One", ("a", "b"), ("c",))]
