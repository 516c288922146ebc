"""The acceptor's view of the cluster: the controller's last image with every later change applied.
Sans-I/O.
"""

import bisect
from collections.abc import Iterable

import msgspec

from mqd.base.views import VIEW_OF
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import RETIRE_HIDDEN, DelegationToken, ScramCredential
from mqd.security.authorizer import Authorizer


def _with_partitions_of(view: messages.TopicImage, base: messages.TopicImage | None) -> messages.TopicImage:
    """Returns the view with the partitions of its base. Operations that need a topic's own log must
    check Metadata.log_topic_of(): a view has none.
    """
    if base is None:  # the base still waits for slots on this host
        return msgspec.structs.replace(view, partition_count=-1)
    return msgspec.structs.replace(
        view,
        partitions=base.partitions,
        partition_count=base.partition_count,
        first_leader_epoch=base.first_leader_epoch,
    )


class Metadata:
    """`version` is that of the newest message applied. A partition is `known` when every worker has
    applied the version that added it: before that, a client could reach a worker that does not know
    the partition yet.
    """

    def __init__(self, rules: Authorizer | None = None) -> None:
        """`rules` is kept up to date with the cluster's access control lists."""
        self.rules = rules if rules is not None else Authorizer()
        self.version = -1  # -1: no image yet
        self.cluster_id = ""
        self.controller_id = -1
        self.brokers: dict[int, messages.BrokerImage] = {}
        self.topics: dict[str, messages.TopicImage] = {}
        self.names: dict[bytes, str] = {}  # topic id -> name
        self.broker_config: dict[str, str] = {}
        self.broker_default_config: dict[str, str] = {}
        self.broker_own_config: dict[str, str] = {}
        self.group_configs: dict[str, dict[str, str]] = {}
        self.client_metrics: dict[str, dict[str, str]] = {}
        self.client_quotas: list[messages.ClientQuota] = []
        # explicit levels; mqd.cluster.metadata.features.levels() adds the defaults
        self.features: dict[str, int] = {}
        self.scram_credentials: dict[tuple[str, int], ScramCredential] = {}  # by user and mechanism
        self.scram_version = 0  # changes with the credentials
        self.delegation_tokens: dict[str, DelegationToken] = {}  # by id
        self.features_version = 0  # version of the message that last changed the features
        # Existing topics that this host's processes do not receive, or receive without some partitions.
        self.withheld: frozenset[str] = frozenset()
        self._node_id = -1  # this host
        # the result of the next take_partitions_led_elsewhere()
        self._led_elsewhere: dict[tuple[str, int], int] = {}
        self.election_count = 0  # elections of partition leaders in the cluster, since this process started
        self.unclean_election_count = 0  # how many of them were unclean
        # the result of the next take_unclean_elections()
        self._unclean_elections: list[tuple[str, messages.PartitionImage]] = []
        # the result of the next take_shrunk_topics()
        self._shrunk: dict[str, int] = {}
        self._sorted_names: list[str] | None = None
        self._views: dict[str, dict[str, messages.TopicImage]] = {}  # topic -> its views, as they were received
        # Topic id -> [(first index of added partitions, version that added them)], until all workers
        # have applied that version.
        self._pending_additions: dict[bytes, list[tuple[int, int]]] = {}

    def apply(self, message: messages.FromController) -> None:
        """Applies a message from the controller. Those without metadata (responses, commands)
        change nothing.
        """
        match message:
            case messages.MessageList():
                for part in message.parts:
                    self.apply(part)
            case messages.PartitionsPut():
                self._put_partitions(message)
            case messages.BrokersPut():
                self.brokers = {broker.node_id: broker for broker in message.brokers}
                self.controller_id = message.controller_id
            case messages.InSyncResponse() | messages.Command() | messages.Response():
                return
            case messages.Image():
                self._replace_all(message)
            case messages.TopicPut():
                self._put_topic(message)
            case messages.TopicRemoved():
                if self.names.pop(message.topic_id, None) is not None:
                    self._note_shrunk(message.name, 0)
                    self._views.get(self.log_topic_of(message.name), {}).pop(message.name, None)
                    del self.topics[message.name]
                    self._pending_additions.pop(message.topic_id, None)
                    self._sorted_names = None
            case messages.BrokerConfigPut():
                self.broker_config, self.broker_default_config = message.config, message.default_config
                self.broker_own_config = message.own_config
            case messages.GroupConfigPut():
                if message.config:
                    self.group_configs[message.group_id] = message.config
                else:
                    self.group_configs.pop(message.group_id, None)
            case messages.ClientMetricsPut():
                if message.config:
                    self.client_metrics[message.name] = message.config
                else:
                    self.client_metrics.pop(message.name, None)
            case messages.AclsPut():
                self.rules.change(dict(message.put), message.removed)
            case messages.CredentialsPut():
                self.scram_version += 1
                for key in message.removed:
                    self.scram_credentials.pop((key[0], key[1]), None)
                for credential in message.put:
                    self.scram_credentials[credential.user, credential.mechanism] = credential
            case messages.TokensPut():
                for token_id in message.removed:
                    self.delegation_tokens.pop(token_id, None)
                self.delegation_tokens.update((token.token_id, token) for token in message.put)
            case messages.SettingsPut():
                self.client_quotas = self.client_quotas if message.client_quotas is None else message.client_quotas
                if message.withheld is not None:
                    self.withheld = frozenset(message.withheld)
                if message.features is not None:
                    self.features, self.features_version = message.features, message.version
        self.version = message.version

    def take_shrunk_topics(self) -> dict[str, int]:
        """Returns a dict that maps each topic that has lost partitions since the last call to the
        lowest partition count it has had since then (0: it was deleted). Includes topics that have
        since been created again or got more partitions.
        """
        shrunk, self._shrunk = self._shrunk, {}
        return shrunk

    def take_partitions_led_elsewhere(self) -> dict[tuple[str, int], int]:
        """Returns a dict of the partitions that another host has led, or may have led, since the
        last call. It maps (internal topic, index) to the newest leader epoch of another host.
        Includes a partition that this host leads again, even if both changes came in one message.
        """
        led_elsewhere, self._led_elsewhere = self._led_elsewhere, {}
        return led_elsewhere

    def take_unclean_elections(self) -> list[tuple[str, messages.PartitionImage]]:
        """Returns the topic and partition of each leader elected from outside the in-sync set since
        the last call. The records that such a leader lacks are lost.
        """
        leaders, self._unclean_elections = self._unclean_elections, []
        return leaders

    def _note_elections(self, old: messages.TopicImage, partitions: Iterable[messages.PartitionImage]) -> None:
        for new in partitions:
            before = old.partitions[new.index] if new.index < len(old.partitions) else None
            if before is not None and new.leader >= 0 and new.leader_epoch > before.leader_epoch:
                self.election_count += 1
            if (
                new.recovering
                and before is not None
                and not (before.recovering and before.leader_epoch == new.leader_epoch)
            ):
                self.unclean_election_count += 1
                self._unclean_elections.append((old.name, new))

    def _note_led_elsewhere(self, topic: messages.TopicImage, partitions: Iterable[messages.PartitionImage]) -> None:
        """`topic` is the state before the change. If leader epochs were skipped in between, any host
        may have led in them.
        """
        if not topic.internal:
            return
        for new in partitions:
            if new.leader not in (-1, self._node_id):
                self._led_elsewhere[(topic.name, new.index)] = new.leader_epoch
            elif new.index < len(topic.partitions) and new.leader_epoch > topic.partitions[new.index].leader_epoch + 1:
                self._led_elsewhere[(topic.name, new.index)] = new.leader_epoch - 1

    def _note_shrunk(self, name: str, remaining_count: int) -> None:
        self._shrunk[name] = min(remaining_count, self._shrunk.get(name, remaining_count))

    def _note_if_shrunk(self, old: messages.TopicImage, new: messages.TopicImage | None) -> None:
        if new is None or new.topic_id != old.topic_id:
            self._note_shrunk(old.name, 0)
        elif 0 <= new.partition_count < max(old.partition_count, len(old.partitions)):
            self._note_shrunk(old.name, new.partition_count)

    def _pending_additions_with(self, image: messages.Image) -> dict[bytes, list[tuple[int, int]]]:
        """Returns _pending_additions with the topics and partitions that the image adds."""
        pending_additions = {}
        for topic in image.topics:
            old = self.by_id(topic.topic_id)
            steps = list(self._pending_additions.get(topic.topic_id, ()))
            old_count = len(old.partitions) if old is not None else 0
            if len(topic.partitions) > old_count:
                steps.append((old_count, image.version))
            if steps:
                pending_additions[topic.topic_id] = steps
        return pending_additions

    def _replace_all(self, image: messages.Image) -> None:
        self.withheld = frozenset(image.withheld)
        published = {topic.name: topic for topic in image.topics}
        self._views = {}
        for topic in image.topics:
            if base := topic.config.get(VIEW_OF):
                self._views.setdefault(base, {})[topic.name] = topic
                published[topic.name] = _with_partitions_of(topic, published.get(base))
        for old in self.topics.values():
            if old.name in published or old.name not in self.withheld:
                self._note_if_shrunk(old, published.get(old.name))
        self._node_id = image.node_id
        for topic in image.topics:
            before = self.topics.get(topic.name, topic)
            self._note_led_elsewhere(before, topic.partitions)
            if before.topic_id == topic.topic_id:
                self._note_elections(before, topic.partitions)
        self._pending_additions = self._pending_additions_with(image) if self.version >= 0 else {}
        self.cluster_id, self.controller_id = image.cluster_id, image.controller_id
        self.brokers = {broker.node_id: broker for broker in image.brokers}
        self.topics = published
        self.names = {topic.topic_id: topic.name for topic in image.topics}
        self.broker_config, self.broker_default_config = image.broker_config, image.broker_default_config
        self.broker_own_config = image.broker_own_config
        self.group_configs = dict(image.group_configs)
        self.client_metrics = dict(image.client_metrics)
        self.client_quotas, self.features, self.features_version = image.client_quotas, image.features, image.version
        self.rules.replace(dict(image.acls))
        self.scram_version += 1
        self.scram_credentials = {
            (credential.user, credential.mechanism): credential for credential in image.scram_credentials
        }
        self.delegation_tokens = {token.token_id: token for token in image.delegation_tokens}
        self._sorted_names = None

    def _put_topic(self, message: messages.TopicPut) -> None:
        topic = message.topic
        if topic.config.get(VIEW_OF):
            self._views.setdefault(topic.config[VIEW_OF], {})[topic.name] = topic
            topic = _with_partitions_of(topic, self.topics.get(topic.config[VIEW_OF]))
        self._publish(topic, message.version)
        self._put_views(topic.name, message.version)

    def _put_views(self, name: str, version: int) -> None:
        """Updates the views of a topic that has changed."""
        for view in self._views.get(name, {}).values():
            self._publish(_with_partitions_of(view, self.topics[name]), version)

    def _publish(self, topic: messages.TopicImage, version: int) -> None:
        old = self.topics.get(topic.name)
        if old is not None:
            self._note_if_shrunk(old, topic)
            self._note_led_elsewhere(old, topic.partitions)
            if old.topic_id == topic.topic_id and not topic.config.get(VIEW_OF):
                self._note_elections(old, topic.partitions)
        if old is None or old.topic_id != topic.topic_id:
            if old is not None:
                self.names.pop(old.topic_id, None)
            self._pending_additions[topic.topic_id] = [(0, version)]
            self._sorted_names = None
        elif len(topic.partitions) > len(old.partitions):
            self._pending_additions.setdefault(topic.topic_id, []).append((len(old.partitions), version))
        self.topics[topic.name] = topic
        self.names[topic.topic_id] = topic.name

    def _put_partitions(self, message: messages.PartitionsPut) -> None:
        topic = self.by_id(message.topic_id)
        if topic is None:
            return
        self._note_led_elsewhere(topic, message.partitions)
        self._note_elections(topic, message.partitions)
        partitions = list(topic.partitions)
        for partition in message.partitions:
            if partition.index < len(partitions):
                partitions[partition.index] = partition
        self.topics[topic.name] = msgspec.structs.replace(topic, partitions=partitions)
        self._put_views(topic.name, message.version)

    def topics_with_logs(self) -> list[messages.TopicImage]:
        """Returns all topics except views. The copy is atomic under the GIL: scrape threads call
        this, too, while the event loop adds and removes topics.
        """
        return [topic for topic in list(self.topics.values()) if not topic.config.get(VIEW_OF)]

    def log_topic_of(self, name: str) -> str:
        """Returns the name of the topic whose log this topic has: its own, or the base of a view."""
        topic = self.topics.get(name)
        return (topic.config.get(VIEW_OF) if topic is not None else None) or name

    def successor_of(self, name: str, index: int) -> int:
        """Returns the index of the partition that took over the records of a partition that was
        retired and removed; -1 if the partition exists, or waits for a slot on this host, or if
        this host knows of no retirement.
        """
        topic = self.topics.get(name)
        if (
            topic is None
            or name in self.withheld
            or not topic.first_leader_epoch
            or not 0 < topic.partition_count <= index
        ):
            return -1
        return index % topic.partition_count

    def may_exist(self, name: str, index: int) -> bool:
        """Whether the partition, or the one that took over its records, may exist. Partitions that wait
        for slots on this host exist: other hosts lead them.
        """
        topic = self.topics.get(name)
        if name in self.withheld:
            return True
        return topic is not None and (
            index < topic.partition_count or topic.partition_count < 0 or topic.first_leader_epoch > 0
        )

    def is_alive(self, node_id: int) -> bool:
        """Whether clients may connect to the broker."""
        broker = self.brokers.get(node_id)
        return broker is not None and not broker.fenced

    def has_broker_in_service(self, node_id: int, incarnation: int) -> bool:
        """Whether the controller has admitted a broker. `node_id`, `incarnation`: this host's, whose
        entry is an old one until it has registered again.
        """
        return any(
            not broker.fenced and (broker.node_id != node_id or broker.incarnation == incarnation)
            for broker in self.brokers.values()
        )

    @property
    def is_single_host(self) -> bool:
        """Whether no other host has ever joined this one, or all of them have left."""
        return len(self.brokers) <= 1

    def visible_partitions(self, topic: messages.TopicImage) -> list[messages.PartitionImage]:
        """The partitions visible to clients: all except the hidden ones at the end, which are being
        emptied.
        """
        partitions = topic.partitions
        return (
            partitions
            if not partitions or partitions[-1].retiring < RETIRE_HIDDEN
            else [partition for partition in partitions if partition.retiring < RETIRE_HIDDEN]
        )

    def known_count(self, topic: messages.TopicImage, applied_version: int) -> int:
        """Returns the number n such that every worker knows the topic's first n partitions."""
        steps = self._pending_additions.get(topic.topic_id)
        if steps is None:
            return len(self.visible_partitions(topic))
        first_unknown = next((first for first, version in steps if version > applied_version), None)
        if first_unknown is None:
            del self._pending_additions[topic.topic_id]
            return len(self.visible_partitions(topic))
        return min(first_unknown, len(self.visible_partitions(topic)))

    def sorted_names(self, from_name: str = "") -> list[str]:
        """Returns the names of all topics in order, starting at `from_name`."""
        if self._sorted_names is None:
            self._sorted_names = sorted(self.topics)
        return (
            self._sorted_names[bisect.bisect_left(self._sorted_names, from_name) :] if from_name else self._sorted_names
        )

    def by_id(self, topic_id: bytes) -> messages.TopicImage | None:
        name = self.names.get(topic_id)
        # in a scrape's thread, the topic may just have been removed
        return self.topics.get(name) if name is not None else None
