"""The health of the cluster in one sentence, how to fix problems, and figures."""

from __future__ import annotations

from starlette.responses import Response

from mqd.base.clock import now_ms
from mqd.cli.common import EXIT_UNREACHABLE, CliError
from mqd.cli.inspection import diagnosis
from mqd.cli.inspection.diagnosis import TITLES, Finding, Harm
from mqd.console import queries
from mqd.console.page_request import PageRequest
from mqd.console.queries import Health
from mqd.console.rendering import sparkline

HEALTH_CACHE_S = 3.0
GROUPS_CACHE_S = 5.0
REBALANCING_STATES = ("PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling")


def sentence(health: Health, findings: list[Finding]) -> tuple[str, str]:
    """Returns (grade, sentence). The grade is good, note, warn or bad."""
    if findings:
        worst = findings[0]
        grade = {Harm.LOSS: "bad", Harm.OUTAGE: "bad", Harm.NO_RESERVE: "warn", Harm.NUISANCE: "note"}[worst.harm]
        return grade, f"{TITLES[worst.harm].capitalize()}: {worst.what}."
    brokers = sum(not node.is_fenced for node in health.nodes)
    replicas = "all replicas in sync" if any(topic.replica_count > 1 for topic in health.topics) else "all online"
    unseen = " (only what you are authorized to see was checked)" if health.unavailable else ""
    return "good", (
        f"Healthy{unseen}: {brokers} broker{'s' * (brokers != 1)} online, {health.partition_count:,}"
        f" partition{'s' * (health.partition_count != 1)}, {replicas}."
    )


def page(request: PageRequest) -> Response:
    try:
        health = request.cached("health", HEALTH_CACHE_S, lambda: queries.health(request.settings))
    except CliError as error:
        if error.exit_code != EXIT_UNREACHABLE:
            raise
        return request.page("away.html", 503, reason=error.message)
    groups, groups_reason = request.attempt(
        lambda: request.cached("groups", GROUPS_CACHE_S, lambda: queries.groups(request.settings))
    )
    metrics = request.console.metrics
    findings = [*health.findings, *diagnosis.group_findings(groups or ()), *metrics.findings(now_ms() / 1000)]
    findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.harm)
    grade, text = sentence(health, findings)
    points = metrics.points()
    charts = [
        ("Records in", "number", [point.records for point in points]),
        ("Bytes in", "size", [point.bytes_in for point in points]),
        ("Bytes out", "size", [point.bytes_out for point in points]),
    ]
    unavailable = [*health.unavailable, *([f"groups: {groups_reason}"] if groups_reason else ())]
    unavailable += [f"metrics of {url}: {reason}" for url, reason in metrics.failures().items()]
    return request.page(
        "overview.html",
        health=health,
        grade=grade,
        sentence=text,
        findings=[(TITLES[finding.harm], finding) for finding in findings],
        unavailable=unavailable,
        topic_count=sum(not topic.is_internal for topic in health.topics),
        in_service=sum(not node.is_fenced for node in health.nodes),
        group_count=None if groups is None else len(groups),
        groups_with_members=sum(bool(group.members) for group in groups or ()),
        rebalancing_groups=sum(group.state in REBALANCING_STATES for group in groups or ()),
        has_metrics=bool(metrics.urls),
        charts=[(title, form, values[-1], sparkline(values), max(values)) for title, form, values in charts if values],
        p99=points[-1].p99_s if points else None,
        free_fraction=metrics.free_fraction(),
        minutes=len(points) // 4,  # metrics.INTERVAL_S is a quarter of a minute
    )
