"""One client's exactly-once copy, as a process of its own that goes on until it is ended; with another code than 0 when the client gives up: whoever runs it starts it again.

    python -m tests.compat.copy_client '{"bootstrap": "127.0.0.1:9092", "client": "aiokafka", "name": "copy-0", "group": "g", "source": "a", "target": "b"}'
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys

from tests.compat.transacting import TRANSACTING

WITHOUT_END = 1 << 40


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # where it stands, when it hangs
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_signal: sys.exit(0))
    TRANSACTING[settings["client"]].copy(settings["bootstrap"], settings["name"], settings["group"], settings["source"], settings["target"], WITHOUT_END)


if __name__ == "__main__":
    main()
