"""All stories, collected by importing their modules."""

from tests.compat.tools import stories_clients, stories_cluster, stories_configs, stories_groups, stories_topics  # noqa: F401
from tests.compat.tools.story import STORIES  # noqa: F401
