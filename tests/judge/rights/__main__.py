"""`python -m tests.judge.rights`: runs the whole table against Apache Kafka, and records the
results.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.judge.rights.recorded import record
from tests.judge.rights.sides import apache_kafka, plain
from tests.judge.rights.table import TOKEN_OWNER, advertised, asking, prepare, prepare_token, rows, run
from tests.kafka_connection import KafkaConnection

with (
    tempfile.TemporaryDirectory() as directory,
    apache_kafka(Path(directory)) as (admin_port, port),
    asking(lambda: KafkaConnection("127.0.0.1", admin_port)) as admin,
    asking(lambda: plain(port)) as alice,
    asking(lambda: plain(port, TOKEN_OWNER)) as owner,
):
    prepare(admin)
    prepare_token(owner)
    found = run(admin, alice, rows(advertised(admin)))
    record(found)
    print(f"{len(found)} rows")
