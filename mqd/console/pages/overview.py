"""Is it well? One sentence, why, and what mends it; then the numbers."""

from __future__ import annotations

from starlette.responses import Response

from mqd.base.clock import now_ms
from mqd.cli.common import EXIT_UNREACHABLE, CliError
from mqd.cli.inspection import diagnosis
from mqd.cli.inspection.diagnosis import TITLES, Finding, Harm
from mqd.console import looking
from mqd.console.looking import Health
from mqd.console.rendering import spark
from mqd.console.visit import Visit

HEALTH_S = 3.0
GROUPS_S = 5.0
MOVING = ("PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling")


def sentence(health: Health, findings: list[Finding]) -> tuple[str, str]:
    """(well | note | warn | bad, the sentence)."""
    if findings:
        worst = findings[0]
        grade = {Harm.LOSS: "bad", Harm.OUTAGE: "bad", Harm.NO_RESERVE: "warn", Harm.NUISANCE: "note"}[worst.harm]
        return grade, f"{TITLES[worst.harm].capitalize()}: {worst.what}."
    brokers = sum(not node.is_fenced for node in health.nodes)
    replicas = "every replica is in sync" if any(topic.replicas > 1 for topic in health.topics) else "each is served"
    unseen = ", as far as you may see" if health.hidden else ""
    return "well", (
        f"All is well{unseen}: {brokers} broker{'s' * (brokers != 1)} in service, {health.partitions:,}"
        f" partition{'s' * (health.partitions != 1)}, {replicas}."
    )


def page(visit: Visit) -> Response:
    try:
        health = visit.cached("health", HEALTH_S, lambda: looking.health(visit.settings))
    except CliError as error:
        if error.exit_code != EXIT_UNREACHABLE:
            raise
        return visit.page("away.html", 503, reason=error.message)
    groups, groups_reason = visit.attempt(
        lambda: visit.cached("groups", GROUPS_S, lambda: looking.groups(visit.settings))
    )
    metrics = visit.console.metrics
    findings = [*health.findings, *diagnosis.of_groups(groups or ()), *metrics.findings(now_ms() / 1000)]
    findings = sorted(dict.fromkeys(findings), key=lambda one: one.harm)
    grade, text = sentence(health, findings)
    points = metrics.points()
    charts = [
        ("Records in", "number", [point.records for point in points]),
        ("Bytes in", "size", [point.bytes_in for point in points]),
        ("Bytes out", "size", [point.bytes_out for point in points]),
    ]
    hidden = [*health.hidden, *([f"groups: {groups_reason}"] if groups_reason else ())]
    hidden += [f"metrics of {url}: {reason}" for url, reason in metrics.failures().items()]
    return visit.page(
        "overview.html",
        health=health,
        grade=grade,
        sentence=text,
        findings=[(TITLES[one.harm], one) for one in findings],
        hidden=hidden,
        topic_count=sum(not topic.is_internal for topic in health.topics),
        in_service=sum(not node.is_fenced for node in health.nodes),
        group_count=None if groups is None else len(groups),
        busy_groups=sum(bool(group.members) for group in groups or ()),
        moving=sum(group.state in MOVING for group in groups or ()),
        has_metrics=bool(metrics.urls),
        charts=[(title, form, values[-1], spark(values), max(values)) for title, form, values in charts if values],
        p99=points[-1].p99_s if points else None,
        free=metrics.free_share(),
        minutes=len(points) // 4,
    )
