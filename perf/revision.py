"""The version of the tree that is measured, and where and when."""

from __future__ import annotations

import datetime
import subprocess

from perf.accounting import machine
from perf.loading import ROOT


def commit() -> str:
    """The commit of the tree, with -dirty when relevant files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "mqd", "native", "perf/*.py", "perf/native")
    return (git("rev-parse", "HEAD") or "unknown") + ("-dirty" if changed else "")


def provenance(command: str) -> str:
    """What the figures of a page say about themselves: command, machine, day and commit."""
    facts, today = machine(), datetime.datetime.now(datetime.UTC)
    return (
        f"`{command}` on {facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, {today:%Y-%m-%d}, commit"
        f" {commit()[:10]}"
    )
