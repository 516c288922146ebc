"""Views: topics without a log, which show those records of another topic that a filter selects."""

from __future__ import annotations

from collections.abc import Mapping

from mqd.base.property_values import ConfigError
from mqd.base.views.conditions import FilterError, parse

VIEW_OF, VIEW_FILTER = "view.of", "view.filter"


def check(config: Mapping[str, str]) -> None:
    """`config`: a topic's own settings. Raises ConfigError."""
    base, text = config.get(VIEW_OF, ""), config.get(VIEW_FILTER, "")
    if bool(base) != bool(text):
        raise ConfigError(f"{VIEW_OF} and {VIEW_FILTER} must be set together", VIEW_OF if base else VIEW_FILTER)
    if not base:
        return
    others = sorted(name for name in config if name not in (VIEW_OF, VIEW_FILTER))
    if others:
        raise ConfigError(
            f"{', '.join(others)} cannot be set for a view, which has no log of its own: set it for {base}", others[0]
        )
    try:
        parse(text)
    except FilterError as error:
        raise ConfigError(f"{VIEW_FILTER}={text[:200]} cannot be read: {error}", VIEW_FILTER, text) from error
