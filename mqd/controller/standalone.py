"""Replaces mqd/controller/membership.py on a host that does not listen for other hosts. Such a host
does not import that module, so that its start does not take longer because of unused code.
"""

from pathlib import Path

import msgspec


class StandaloneMembership:
    seeds: tuple[str, ...] = ()
    address = ("", 0)

    async def listen(self) -> None:
        pass

    async def form(self, lost_cluster_id: str):
        raise AssertionError("a host without seeds cannot form a cluster")

    def members(self) -> tuple[int, ...]:
        return ()

    def on_joined(self, cluster_id: str, shell: object) -> None:
        pass

    async def start_gossip(self, directory: Path, *more: object) -> None:
        pass

    def send(self, node_id: int, message: msgspec.Struct) -> None:
        pass

    def add_address(self, node_id: int, host: str, port: int) -> None:
        pass

    async def stop(self) -> None:
        pass
