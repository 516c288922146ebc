"""`python -m tests.compat.tools [WORD...]`: runs the stories whose names contain a word, and prints
differences without a reason. `--page` writes docs/kafka-tools.md instead.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import traceback
from pathlib import Path

from tests.compat.kafka_tools import KafkaTools
from tests.compat.tools.catalogue import STORIES
from tests.compat.tools.differences import Verdict
from tests.compat.tools.page import PAGE, render
from tests.compat.tools.sides import started


def main(words: list[str]) -> None:
    # when terminated, it still stops the brokers that it started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if words == ["--page"]:
        PAGE.write_text(render())
        return
    chosen = [story for story in STORIES.values() if not words or any(word in story.name for word in words)]
    with tempfile.TemporaryDirectory() as place:
        tools = KafkaTools(Path(place))
        for count in sorted({story.brokers for story in chosen}):
            with started(tools, Path(place), count) as sides:
                for story in (story for story in chosen if story.brokers == count):
                    try:
                        kafka, mqd = sides.tell(story.tell)
                    except Exception:  # the other stories are still worth running
                        print(f"=== {story.name}")
                        traceback.print_exc(file=sys.stdout)
                        continue
                    verdict = Verdict(story.name, kafka, mqd)
                    print(f"=== {story.name}: {len(kafka)} steps", *verdict.unexplained, sep="\n", flush=True)
                    for entry in verdict.unused:
                        print(f"not needed: {entry}")


if __name__ == "__main__":
    main(sys.argv[1:])
