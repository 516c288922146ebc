"""README's Python program runs literally, except for the port, and prints the output shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def test_the_program_runs(shared_broker) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert program.count("127.0.0.1:9092") == 2
    done = subprocess.run(
        [sys.executable, "-c", program.replace("127.0.0.1:9092", shared_broker.bootstrap)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["100001", "records", "through", "shm"], done.stdout
