"""A membership core under test, of either group protocol, and its clock."""

from __future__ import annotations

from typing import Any

from mqd.client.group.events import ResponseReceived, Send


class CoreMember:
    def __init__(self, core: Any) -> None:
        self.core = core
        self.now_ms = 0
        self.number = 0  # of the last request

    def give(self, event: object) -> list:
        actions = self.core.handle(event, self.now_ms)
        self.core.check()
        for action in actions:
            if isinstance(action, Send):
                self.number = action.number
        return actions

    def answered(self, response: object) -> list:
        return self.give(ResponseReceived(self.number, response))
