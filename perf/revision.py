"""The version of the tree that is measured."""

from __future__ import annotations

import subprocess

from perf.loading import ROOT


def commit() -> str:
    """The commit of the tree, with -dirty when relevant files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "mqd", "native", "perf/*.py", "perf/native")
    return (git("rev-parse", "HEAD") or "unknown") + ("-dirty" if changed else "")
