"""Commands of mqd, called in this process against a broker: quick, and with exit code, stdout and
stderr separate.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mqd.cli import main as main_module
from tests.broker import Broker


class CommandLine:
    """`mqd("group", "list")` -> (exit code, stdout, stderr); mqd.json(...) -> its JSON output;
    the exit code must be 0.
    """

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        monkeypatch.setenv("MQD_BOOTSTRAP", broker.bootstrap)
        self._capture = capture

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capture.readouterr()
        code = main_module._run(list(arguments))
        sys.stdout.flush()
        out, error = self._capture.readouterr()
        return code, out.decode(), error.decode()

    def json(self, *arguments: str) -> Any:
        code, out, error = self(*arguments, "--format", "json")
        assert code == 0, error
        return json.loads(out)
