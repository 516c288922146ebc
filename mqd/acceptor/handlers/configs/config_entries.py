"""Configuration entries for DescribeConfigs and CreateTopics: the value, its source, and its
synonyms (KIP-226, KIP-525, KIP-569).
"""

from collections.abc import Mapping
from typing import NamedTuple

from mqd.acceptor.broker import Broker
from mqd.base.config import BROKER, CLIENT_METRICS, GROUP, TOPIC, Property, property_of, topic_effective
from mqd.base.listeners import override_of
from mqd.cluster.metadata.rules.partitions import COMPUTED as FOLLOWS_REPLICAS
from mqd.cluster.metadata.rules.partitions import MIN_IN_SYNC, effective_min_in_sync

TOPIC_DYNAMIC, BROKER_DYNAMIC, BROKER_DYNAMIC_DEFAULT, BROKER_STATIC, DEFAULT = 1, 2, 3, 4, 5
CLIENT_METRICS_DYNAMIC, GROUP_DYNAMIC = 7, 8
# Kafka's ConfigDef types. Kafka has no enumeration type: an enumeration is a string, whose allowed
# values are in the documentation.
TYPES = {"bool": 1, "string": 2, "enum": 2, "int": 3, "long": 5, "double": 6, "list": 7}


class Synonym(NamedTuple):
    name: str
    value: str | None
    source: int


class ConfigEntry(NamedTuple):
    name: str
    value: str | None
    source: int
    is_read_only: bool
    is_sensitive: bool
    type: int
    documentation: str
    synonyms: list[Synonym]  # the effective synonym first


def _shown_value(prop: Property, value: str | None) -> str | None:
    return None if prop.sensitive else value


def _entry(prop: Property, synonyms: list[Synonym], read_only: bool) -> ConfigEntry:
    first = synonyms[0] if synonyms else Synonym(prop.name, None, DEFAULT)
    return ConfigEntry(
        prop.name, first.value, first.source, read_only, prop.sensitive, TYPES[prop.kind], prop.doc, synonyms
    )


def _broker_synonyms(broker: Broker, prop: Property) -> list[Synonym]:
    """`prop` is a broker's property. The loaded configuration contains defaults too, so a value
    equal to the default is reported as the default.
    """
    metadata, synonyms = broker.metadata, []
    name = prop.name
    default_dynamic = metadata.broker_default_config.get(name)
    own_dynamic = metadata.broker_own_config.get(name)
    if own_dynamic is not None:
        synonyms.append(Synonym(name, _shown_value(prop, own_dynamic), BROKER_DYNAMIC))
    if default_dynamic is not None:
        synonyms.append(Synonym(name, _shown_value(prop, default_dynamic), BROKER_DYNAMIC_DEFAULT))
    static = broker.config.get(name)
    if static is not None and static != prop.default:
        synonyms.append(Synonym(name, _shown_value(prop, static), BROKER_STATIC))
    if prop.default is not None:
        synonyms.append(Synonym(name, _shown_value(prop, prop.default), DEFAULT))
    return synonyms


def topic_entries(
    broker: Broker, config: Mapping[str, str], replica_count: int, names: set[str] | None = None
) -> list[ConfigEntry]:
    """`config`: the topic's own settings. `replica_count`: the number of replicas of its
    partitions; min.insync.replicas=-1 is shown as the effective number.
    """
    effective = topic_effective(broker.effective_config(), config)
    entries = []
    for name, prop in TOPIC.items():
        if names is not None and name not in names:
            continue
        synonyms = [Synonym(name, _shown_value(prop, config[name]), TOPIC_DYNAMIC)] if name in config else []
        if prop.broker_name is not None:
            synonyms += _broker_synonyms(broker, BROKER[prop.broker_name])
        # the synonyms lack the value if the broker's setting has another unit (log.retention.hours)
        if not synonyms or synonyms[0].value != effective[name]:
            synonyms.insert(
                0,
                Synonym(
                    name,
                    _shown_value(prop, effective[name]),
                    DEFAULT if effective[name] == prop.default else BROKER_STATIC,
                ),
            )
        # tools compare this value with the size of in-sync sets
        if name == MIN_IN_SYNC and synonyms[0].value == str(FOLLOWS_REPLICAS):
            synonyms[0] = synonyms[0]._replace(value=str(effective_min_in_sync(FOLLOWS_REPLICAS, replica_count)))
        entries.append(_entry(prop, synonyms, False))
    return entries


def group_entries(broker: Broker, config: Mapping[str, str], names: set[str] | None = None) -> list[ConfigEntry]:
    """`config`: the group's own settings."""
    entries = []
    for name, prop in GROUP.items():
        if names is None or name in names:
            own = [Synonym(name, _shown_value(prop, config[name]), GROUP_DYNAMIC)] if name in config else []
            # a config without a broker property has only its own default
            others = (
                _broker_synonyms(broker, BROKER[prop.broker_name])
                if prop.broker_name
                else [Synonym(name, prop.default, DEFAULT)]
            )
            entries.append(_entry(prop, own + others, False))
    return entries


def client_metrics_entries(config: Mapping[str, str], names: set[str] | None = None) -> list[ConfigEntry]:
    """`config`: the subscription's own settings. A default is not listed as a synonym, as in
    Kafka."""
    entries = []
    for name, prop in CLIENT_METRICS.items():
        if names is None or name in names:
            own = [Synonym(name, config[name], CLIENT_METRICS_DYNAMIC)] if name in config else []
            entry = _entry(prop, own or [Synonym(name, prop.default, DEFAULT)], False)
            entries.append(entry._replace(synonyms=own))
    return entries


def broker_entries(broker: Broker, advertised: str, names: set[str] | None = None) -> list[ConfigEntry]:
    """This broker's properties. advertised.listeners is included even if it is not set, because
    tools look for it.
    """
    entries = []
    listener_properties = {
        name: property_of(BROKER, name) for name in broker.metadata.broker_config if override_of(name)
    }
    for name, prop in {**BROKER, **listener_properties}.items():
        if names is not None and name not in names:
            continue
        synonyms = _broker_synonyms(broker, prop)
        if name == "advertised.listeners" and not synonyms:
            synonyms = [Synonym(name, advertised, DEFAULT)]
        entries.append(_entry(prop, synonyms, not prop.dynamic))
    return entries


def all_brokers_entries(broker: Broker, names: set[str] | None = None) -> list[ConfigEntry]:
    """The entries for the resource name "": the dynamic settings for all brokers."""
    return [
        _entry(prop, [Synonym(name, _shown_value(prop, value), BROKER_DYNAMIC_DEFAULT)], False)
        for name, value in broker.metadata.broker_default_config.items()
        if (name in BROKER or override_of(name)) and (names is None or name in names)
        for prop in (property_of(BROKER, name),)
    ]
