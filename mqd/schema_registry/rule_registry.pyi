# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.rule_registry import (
    RuleAction as RuleAction,
    RuleExecutor as RuleExecutor,
    RuleOverride as RuleOverride,
    RuleRegistry as RuleRegistry,
)
