"""franz-go on three brokers created by `mqd cluster local --secure`: transactions and a group, with
coordinators on several hosts; a client with a wrong password. Its mechanisms: test_mechanisms.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.go_client import build_go_client, round_trip
from tests.interaction.security.test_cluster_secure import secure_cluster

pytestmark = pytest.mark.slow  # Go compiles its client for a minute of CPU


def test_transactions_on_three_brokers(tmp_path: Path) -> None:
    program = build_go_client()
    with secure_cluster(tmp_path / "cluster") as (port, data_dir):
        admin = dict(
            line.split("=", 1)
            for line in (data_dir / "broker-1" / "secure" / "admin.properties").read_text().splitlines()
        )
        words = {
            "seeds": ",".join(f"127.0.0.{node_id}:{port}" for node_id in (1, 2, 3)),
            "ca": admin["ssl.ca.location"],
            "mechanism": admin.get("sasl.mechanisms", admin.get("sasl.mechanism")),
            "user": admin["sasl.username"],
            "topic": "go-cluster",
        }
        done = round_trip(program, **words, password=admin["sasl.password"], seconds=60)
        assert (done.returncode, done.stdout) == (0, "read 100\n"), done.stderr
        refused = round_trip(program, **words, password="no.such.proof", seconds=5)
        assert refused.returncode == 1 and refused.stdout == "" and "auth" in refused.stderr, refused.stderr
