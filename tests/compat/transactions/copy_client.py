"""One client's exactly-once copy, as a separate process that continues until it is stopped; it
exits with a non-zero code when the client gives up, and its supervisor restarts it.

    python -m tests.compat.transactions.copy_client '{"bootstrap": "127.0.0.1:9092",
    "client": "aiokafka", "name": "copy-0", "group": "g", "source": "a", "target": "b"}'

A round that takes longer than HUNG_S ends the process, like an application's health check, because
of client bugs when the host of a group's coordinator dies (each shown with that host killed between
two transactions; the broker had responded to every request):

* librdkafka (2.10 to 2.16; its issues 5456 and 5511) forgets a broker that Metadata no longer
  contains, but not that it was the coordinator: send_offsets_to_transaction waits for it, without a
  time limit, even when it is back.
* kafka-python (3.0.12) drops a request to a coordinator that it cannot connect to (the sender looks
  up the coordinator again, and does not requeue the request): send_offsets_to_transaction, which
  has no time limit, waits for its response forever.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys

from tests.compat.transactions.transacting import TRANSACTING

ROUND_RECORDS = 200  # a few would never catch up with a load
HUNG_S = 20.0


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # prints the stack when it hangs
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_signal: sys.exit(0))
    topics = settings["source"], settings["target"]
    TRANSACTING[settings["client"]].copy(
        settings["bootstrap"],
        settings["name"],
        settings["group"],
        *topics,
        None,
        ROUND_RECORDS,
        lambda: faulthandler.dump_traceback_later(HUNG_S, exit=True),
    )


if __name__ == "__main__":
    main()
