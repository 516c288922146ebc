"""Random events in the small cluster of controller_world.py: its next step, its faults, its
clients' changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.cluster.broker import core as broker_core
from mqd.cluster.host import messages
from mqd.cluster.metadata import core as metadata_core

if TYPE_CHECKING:
    from tests.unit.controller.controller_world import Host, World


class Chance:
    """Mixed into World."""

    def step(self: World) -> None:
        dice = self.random.random()
        up = self.up()
        if dice < 0.22:
            self.advance(self.random.choice([5, 20, 60, 200, 700]))
        elif dice < 0.36:
            self.append()
        elif dice < 0.62:
            self.fetch()
        elif dice < 0.72:
            self.propose()
        elif dice < 0.84:
            if self.proposed:
                self.commit()
        elif dice < 0.93:
            behind = [host for host in up if host.applied < len(self.log)]
            if behind:
                self.learn(self.random.choice(behind))
        else:
            self.fault(up)
        up = self.up()
        if self.active < 0 and up and self.random.random() < 0.3:
            self.elect(self.random.choice(up).node)

    def fault(self: World, up: list[Host]) -> None:
        dice = self.random.random()
        node = self.random.choice(list(self.hosts))
        if dice < 0.12:
            self.crash(node, clean=self.random.random() < 0.3, wipe=self.random.random() < 0.1)
        elif dice < 0.45:
            if not self.hosts[node].up:
                self.restart(node)
        elif dice < 0.5:
            if self.active >= 0:
                self.depose()
        elif dice < 0.6:
            other = self.random.choice(list(self.hosts))
            self.cut |= {(node, other), (other, node)} if self.random.random() < 0.6 else {(node, other)}
        elif dice < 0.72:
            self.cut.clear()
        elif dice < 0.76 and self.active >= 0 and self.proposed:
            kept = self.random.randint(0, len(self.proposed) - 1)
            version = self.proposed[kept].base_offset
            del self.proposed[kept:]
            self.metadata(
                self.hosts[self.active], metadata_core.PersistFailed("no space left on device", kept_version=version)
            )
        elif dice < 0.82 and up:
            self.kill_worker(self.random.choice(up))
        elif dice < 0.84 and up:
            host = self.random.choice(up)
            self.on_broker(host, broker_core.ShutdownRequested())
        elif dice < 0.87 and up:
            host = self.random.choice(up)
            self.on_broker(host, broker_core.HostDied())
            self.kill_worker(host)
            self.on_broker(host, broker_core.HostDied(False))
        elif up:
            self.request(self.random_change())
        for host in up:
            if host.up and host.ended:
                self.crash(host.node, clean=True)

    def random_change(self: World):
        choose, topics = self.random.choice, sorted(self.unlogged.topics)
        nodes = sorted(self.hosts)
        dice = self.random.random()
        if not topics or dice < 0.12:
            return messages.CreateTopic(
                f"topic-{self.random.randint(0, 5)}",
                choose([1, 2, 4]),
                choose([-1, -1, 2, 3]),
                {},
                {} if dice < 0.06 else {"min.insync.replicas": choose("12")},
            )
        name = choose(topics)
        index = self.random.randrange(len(self.unlogged.topics[name].partitions))
        if dice < 0.5:
            target = (
                None
                if self.random.random() < 0.25
                else self.random.sample(nodes, self.random.randint(1, min(3, len(nodes))))
            )
            return messages.AlterReassignments([messages.PartitionReassignment(name, index, target)])
        if dice < 0.62:
            return messages.ElectLeaders(0, choose([None, [(name, index)]]))
        if dice < 0.7:
            return messages.DrainBroker(choose(nodes), self.random.random() < 0.5)
        if dice < 0.75:
            return messages.BalanceReplicas()
        if dice < 0.8:
            return messages.UnregisterBroker(choose(nodes))
        if dice < 0.86:
            return messages.AlterConfig(
                2,
                name,
                [messages.ConfigOperation("min.insync.replicas", choose(["set", "delete"]), choose("123"))],
                False,
            )
        if dice < 0.9:
            return messages.RetirePartitions(name, self.random.randint(1, 2))
        if dice < 0.93:
            return messages.ReleaseRetired(name)
        if dice < 0.96:
            return messages.DeleteTopic(name, None)
        return messages.AddPartitions(name, len(self.unlogged.topics[name].partitions) + 1, None)
