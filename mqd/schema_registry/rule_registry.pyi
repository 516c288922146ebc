# mypy: disable-error-code="attr-defined"
from confluent_kafka.schema_registry.rule_registry import RuleAction as RuleAction
from confluent_kafka.schema_registry.rule_registry import RuleExecutor as RuleExecutor
from confluent_kafka.schema_registry.rule_registry import RuleOverride as RuleOverride
from confluent_kafka.schema_registry.rule_registry import RuleRegistry as RuleRegistry
