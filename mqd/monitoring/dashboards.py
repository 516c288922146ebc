"""Grafana's dashboards for brokers.

Four dashboards: the cluster, one topic, one group, and the internals of one broker. They are
provisioned as files (Grafana 9 and later), with the data source as a variable.
"""

import json
from typing import Any, NamedTuple

_WIDTH, _HEIGHT, _COLUMNS = 24, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """`queries`: (PromQL, legend). `unit`: Grafana's name. `limits`: the values from which the
    panel is yellow and red; `is_number`: shows a number instead of a curve.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""
    limits: tuple[float, float] | None = None
    is_number: bool = False


class Variable(NamedTuple):
    """A variable of a dashboard, filled from the values of a label."""

    name: str
    metric: str
    label: str


class Dashboard(NamedTuple):
    uid: str
    title: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]


def _latency_queries(metric: str, selector: str = "", by: str = "instance") -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({quantile}, sum by ({by}, le)"
            f" (rate({metric}_bucket{{{selector}}}[$__rate_interval])))",
            f"{name} {{{{{by}}}}}",
        )
        for quantile, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
    )


_TOPIC_MATCHER, _GROUP_MATCHER, _BROKER_MATCHER = 'topic="$topic"', 'consumergroup="$group"', 'instance="$broker"'

CLUSTER = Dashboard(
    "mqd-cluster",
    "mqd: the cluster",
    (),
    (
        Panel(
            "Brokers in service",
            "none",
            (('max by (cluster) (mqd_cluster_brokers{state="in_service"})', "{{cluster}}"),),
            is_number=True,
        ),
        Panel(
            "Partitions without a leader",
            "none",
            (("max by (cluster) (mqd_cluster_partitions_without_leader)", "{{cluster}}"),),
            "They can be neither written nor read.",
            (1, 1),
            True,
        ),
        Panel(
            "Partitions that refuse acks=all",
            "none",
            (("sum by (cluster) (mqd_partitions_under_min_in_sync)", "{{cluster}}"),),
            "Fewer replicas in sync than min.insync.replicas.",
            (1, 1),
            True,
        ),
        Panel(
            "Partitions with replicas out of sync",
            "none",
            (("sum by (cluster) (mqd_partitions_under_replicated)", "{{cluster}}"),),
            limits=(1, 100),
            is_number=True,
        ),
        Panel(
            "Active controllers",
            "none",
            (("sum by (cluster) (mqd_cluster_active_controller)", "{{cluster}}"),),
            "Must be one.",
            None,
            True,
        ),
        Panel(
            "Unclean elections in the last 24 h",
            "none",
            (("sum by (cluster) (increase(mqd_unclean_leader_elections_total[1d]))", "{{cluster}}"),),
            "Each one lost acknowledged records.",
            (1, 1),
            True,
        ),
        Panel(
            "Records appended",
            "cps",
            (("sum by (instance) (rate(mqd_records_appended_total[$__rate_interval]))", "{{instance}}"),),
        ),
        Panel(
            "Bytes produced",
            "Bps",
            (("sum by (instance) (rate(mqd_bytes_appended_total[$__rate_interval]))", "{{instance}}"),),
        ),
        Panel(
            "Bytes consumed",
            "Bps",
            (("sum by (instance) (rate(mqd_fetch_bytes_total[$__rate_interval]))", "{{instance}}"),),
        ),
        Panel("Produce latency", "s", _latency_queries("mqd_produce_seconds"), "From the request to the response."),
        Panel(
            "Bytes replicated",
            "Bps",
            (("sum by (instance) (rate(mqd_replica_bytes_total[$__rate_interval]))", "{{instance}}"),),
        ),
        Panel(
            "In-sync set changes",
            "cps",
            (
                ("sum by (instance) (rate(mqd_in_sync_shrinks_total[$__rate_interval]))", "left, {{instance}}"),
                ("sum by (instance) (rate(mqd_in_sync_expands_total[$__rate_interval]))", "joined, {{instance}}"),
            ),
        ),
        Panel(
            "Leader elections",
            "cps",
            (("max by (cluster) (rate(mqd_leader_elections_total[$__rate_interval]))", "{{cluster}}"),),
            "Expected only when a host leaves or is drained.",
        ),
        Panel(
            "Topics written to most",
            "Bps",
            (("topk(10, sum by (topic) (rate(mqd_topic_bytes_in_total[$__rate_interval])))", "{{topic}}"),),
        ),
        Panel(
            "Topics read most",
            "Bps",
            (("topk(10, sum by (topic) (rate(mqd_topic_bytes_out_total[$__rate_interval])))", "{{topic}}"),),
        ),
        Panel("Connections", "none", (("sum by (instance) (mqd_connections)", "{{instance}}"),)),
        Panel(
            "Disk space left",
            "percentunit",
            (("mqd_log_dir_free_bytes / mqd_log_dir_total_bytes", "{{instance}} {{directory}}"),),
        ),
        Panel(
            "Groups furthest behind",
            "s",
            (
                (
                    "topk(10, max by (consumergroup, topic) (mqd_consumergroup_lag_seconds))",
                    "{{consumergroup}} {{topic}}",
                ),
            ),
            "How long the first uncommitted record has waited for the group.",
        ),
    ),
)

TOPIC = Dashboard(
    "mqd-topic",
    "mqd: a topic",
    (Variable("topic", "mqd_partition_log_end_offset", "topic"),),
    (
        Panel(
            "Records appended",
            "cps",
            (
                (
                    f"max by (partition) (rate(mqd_partition_log_end_offset{{{_TOPIC_MATCHER}}}[$__rate_interval]))",
                    "{{partition}}",
                ),
            ),
        ),
        Panel(
            "Bytes produced and consumed",
            "Bps",
            (
                (f"sum by (topic) (rate(mqd_topic_bytes_in_total{{{_TOPIC_MATCHER}}}[$__rate_interval]))", "in"),
                (f"sum by (topic) (rate(mqd_topic_bytes_out_total{{{_TOPIC_MATCHER}}}[$__rate_interval]))", "out"),
            ),
            "Excludes what clients on a broker's host read directly from its files.",
        ),
        Panel(
            "Size", "bytes", ((f"max by (partition) (mqd_partition_size_bytes{{{_TOPIC_MATCHER}}})", "{{partition}}"),)
        ),
        Panel(
            "Records that can be read",
            "none",
            (
                (
                    f"max by (partition) (mqd_partition_high_watermark{{{_TOPIC_MATCHER}}}"
                    f" - mqd_partition_log_start_offset{{{_TOPIC_MATCHER}}})",
                    "{{partition}}",
                ),
            ),
        ),
        Panel(
            "Partitions that are not served",
            "none",
            ((f"count(mqd_partition_online{{{_TOPIC_MATCHER}}} == 0) or vector(0)", ""),),
            limits=(1, 1),
            is_number=True,
        ),
        Panel(
            "Lag of consumer groups",
            "none",
            ((f"sum by (consumergroup) (kafka_consumergroup_lag{{{_TOPIC_MATCHER}}})", "{{consumergroup}}"),),
        ),
        Panel(
            "Time lag of consumer groups",
            "s",
            ((f"max by (consumergroup) (mqd_consumergroup_lag_seconds{{{_TOPIC_MATCHER}}})", "{{consumergroup}}"),),
        ),
    ),
)

GROUP = Dashboard(
    "mqd-group",
    "mqd: a consumer group",
    (Variable("group", "kafka_consumergroup_members", "consumergroup"),),
    (
        Panel("Members", "none", ((f"max(kafka_consumergroup_members{{{_GROUP_MATCHER}}})", ""),), is_number=True),
        Panel("Lag", "none", ((f"sum by (topic) (kafka_consumergroup_lag{{{_GROUP_MATCHER}}})", "{{topic}}"),)),
        Panel("Time lag", "s", ((f"max by (topic) (mqd_consumergroup_lag_seconds{{{_GROUP_MATCHER}}})", "{{topic}}"),)),
        Panel("Rebalance", "s", ((f"max(mqd_consumergroup_rebalance_seconds{{{_GROUP_MATCHER}}})", "duration"),)),
        Panel(
            "Records committed",
            "cps",
            (
                (
                    f"sum by (topic) (rate(kafka_consumergroup_current_offset{{{_GROUP_MATCHER}}}[$__rate_interval]))",
                    "{{topic}}",
                ),
            ),
        ),
        Panel(
            "Lag by partition", "none", ((f"kafka_consumergroup_lag{{{_GROUP_MATCHER}}}", "{{topic}} {{partition}}"),)
        ),
        Panel(
            "Time lag by partition",
            "s",
            ((f"mqd_consumergroup_lag_seconds{{{_GROUP_MATCHER}}}", "{{topic}} {{partition}}"),),
        ),
    ),
)

BROKER = Dashboard(
    "mqd-broker",
    "mqd: inside a broker",
    (Variable("broker", "mqd_worker_running", "instance"),),
    (
        Panel("Running workers", "none", ((f"sum(mqd_worker_running{{{_BROKER_MATCHER}}})", ""),), is_number=True),
        Panel(
            "Process deaths in the last 24 h",
            "none",
            ((f"sum by (process) (increase(mqd_process_deaths_total{{{_BROKER_MATCHER}}}[1d]))", "{{process}}"),),
            limits=(1, 5),
            is_number=True,
        ),
        Panel(
            "Process restarts in the last 24 h, by reason",
            "none",
            (
                (
                    f"sum by (process, reason) (increase(mqd_process_restarts_total{{{_BROKER_MATCHER}}}[1d])) > 0",
                    "{{process}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Certificates expire in",
            "s",
            ((f"mqd_certificate_expiry_timestamp_seconds{{{_BROKER_MATCHER}}} - time()", "{{listener}}"),),
            is_number=True,
        ),
        Panel("Produce latency", "s", _latency_queries("mqd_produce_seconds", _BROKER_MATCHER, "worker")),
        Panel(
            "Fetch latency",
            "s",
            _latency_queries("mqd_fetch_seconds", _BROKER_MATCHER, "worker"),
            "Includes waiting for records.",
        ),
        Panel("Flush latency", "s", _latency_queries("mqd_sync_seconds", _BROKER_MATCHER, "worker")),
        Panel(
            "Oldest flush under way",
            "s",
            ((f"max by (worker) (mqd_sync_oldest_seconds{{{_BROKER_MATCHER}}})", "worker {{worker}}"),),
        ),
        Panel(
            "An iteration of the worker's loop",
            "s",
            _latency_queries("mqd_loop_seconds", _BROKER_MATCHER, "worker"),
            "How long everything else on the worker has to wait.",
        ),
        Panel("Requests handled by the acceptor", "s", _latency_queries("mqd_handler_seconds", _BROKER_MATCHER, "api")),
        Panel(
            "Requests",
            "reqps",
            tuple(
                (f"sum(rate(mqd_requests_{kind}_total{{{_BROKER_MATCHER}}}[$__rate_interval]))", kind)
                for kind in ("produce", "fetch", "list_offsets", "cached", "forwarded_control")
            ),
        ),
        Panel("Connections", "none", ((f"mqd_connections{{{_BROKER_MATCHER}}}", "worker {{worker}}"),)),
        Panel(
            "Receive arena in use",
            "percentunit",
            (
                (
                    f"mqd_arena_extents_used{{{_BROKER_MATCHER}}} / mqd_arena_extents_max{{{_BROKER_MATCHER}}}",
                    "worker {{worker}}",
                ),
            ),
        ),
        Panel("Heap used by requests", "bytes", ((f"mqd_heap_bytes{{{_BROKER_MATCHER}}}", "worker {{worker}}"),)),
        Panel(
            "Stalls",
            "cps",
            tuple(
                (f"sum(rate(mqd_{kind}_stalls_total{{{_BROKER_MATCHER}}}[$__rate_interval]))", kind)
                for kind in ("arena", "link", "large")
            ),
            "Waits for shared memory, for another process, or for memory for large requests.",
        ),
        Panel(
            "Fetches of bytes outside the page cache",
            "reqps",
            ((f"sum(rate(mqd_fetch_cold_total{{{_BROKER_MATCHER}}}[$__rate_interval]))", ""),),
        ),
        Panel("Local clients", "none", ((f"sum(mqd_local_attachments{{{_BROKER_MATCHER}}})", "attached"),)),
    ),
)

DASHBOARDS = (CLUSTER, TOPIC, GROUP, BROKER)


def all_queries() -> list[tuple[str, str]]:
    """(dashboard: panel, PromQL) of every panel and variable."""
    result = []
    for board in DASHBOARDS:
        result += [
            (f"{board.title}: ${variable.name}", f"{variable.metric}{{{variable.label}!=''}}")
            for variable in board.variables
        ]
        result += [(f"{board.title}: {panel.title}", query) for panel in board.panels for query, _ in panel.queries]
    return result


def render_dashboard(board: Dashboard) -> str:
    """The dashboard in Grafana's JSON."""
    return json.dumps(
        {
            "uid": board.uid,
            "title": board.title,
            "tags": ["mqd"],
            "schemaVersion": 38,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "links": [{"type": "dashboards", "tags": ["mqd"], "title": "mqd", "asDropdown": True, "keepTime": True}],
            "templating": {"list": [_source_variable(), *map(_variable, board.variables)]},
            "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
        },
        indent=2,
    )


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": variable.name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    width = _WIDTH // _COLUMNS
    row, column = divmod(number, _COLUMNS)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.limits is not None:
        yellow, red = panel.limits
        steps = [("green", None), ("yellow", yellow), ("red", red)]
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for color, value in steps],
        }
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.description,
        "type": "stat" if panel.is_number else "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": width, "x": column * width, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
