"""`make test`: pytest's quick tier; what failed is run once more, alone, by fresh brokers, and named.

Thousands of tests with real processes, on a machine whose speed nobody promises: one of them may lose a race against its own time limit. A test that fails twice,
or is one of more than AGAIN_MAX, fails the run. One that passes the second time is printed as such, so that it is looked into; the slow tiers have no second try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

AGAIN_MAX = 5
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def run(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments]).returncode


def main() -> int:
    LAST_FAILED.unlink(missing_ok=True)
    status = run(*sys.argv[1:])
    failed = sorted(json.loads(LAST_FAILED.read_text())) if status == 1 and LAST_FAILED.exists() else []
    if not 0 < len(failed) <= AGAIN_MAX:
        return status
    print(f"\n{len(failed)} failed and {'is' if len(failed) == 1 else 'are'} run once more, alone:", *failed, sep="\n  ", flush=True)
    status = run("--last-failed", "--last-failed-no-failures=none", *sys.argv[1:])
    if status == 0:
        print("\npassed the second time, to be looked into:", *failed, sep="\n  ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
