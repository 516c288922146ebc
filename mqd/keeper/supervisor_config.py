"""`mqd up --print-supervisord`: the shipped supervisord.conf with its variables filled in.

    whole      for a supervisord that runs this broker and nothing else, and ends with it
    include    the programs alone, for a supervisord that runs other programs too. The broker never
               stops that supervisord, which restarts the keeper and with it the other processes
               (KeeperClient.exit_status)

Each program is a group of its own: supervisord stops groups one after the other, beginning with
the keeper, so that a host in a cluster hands over its leaderships before its processes end.
"""

from __future__ import annotations

import configparser
import io
import re
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = re.compile(r"%\(ENV_(\w+)\)s")
# For supervisord, an exit within startsecs is a failed start: a keeper that cannot bind its port or
# lock its directories is restarted ten times, with growing delays. Until it is up, the other
# processes wait.
START_S = 1
_KEEPER_OPTIONS = {"autorestart": "unexpected", "exitcodes": "0", "startsecs": str(START_S), "startretries": "10"}
_HEAD = "; Printed by `mqd up --print-supervisord {kind}`: print it again after a change of options or version.\n"
_START_AND_STOP = (
    "; Start: supervisorctl start {keeper} {others}. Stop, cleanly: supervisorctl stop {keeper}, or mqd down.\n"
)


class Unrepresentable(ValueError):
    """A value that supervisord's configuration cannot hold."""


def _assignment(name: str, value: str) -> str:
    """NAME="value" in supervisord's syntax, which has no escapes."""
    quote = "'" if '"' in value else '"'
    # supervisord takes everything after a space and a semicolon for a comment
    if quote in value or value.strip("'\"") != value or "\n" in value or " ;" in value:
        raise Unrepresentable(
            f"{name}: supervisord's configuration cannot hold this value because of a quotation mark, a line break or a"
            " semicolon after a space; set it in a file (--config)"
        )
    return f"{name}={quote}{value.replace('%', '%%')}{quote}"


def _environment(values: Mapping[str, str]) -> str:
    return ",".join(_assignment(name, value) for name, value in values.items())


def render_configuration(
    shipped: Path, kind: str, variables: Mapping[str, str], properties: Mapping[str, str], user: str, prefix: str
) -> str:
    """`kind`: see the module docstring. `variables` are those that the shipped file names;
    `properties` are for the keeper. `user` and `prefix` (of the programs' names) are used only if
    `kind` is "include". Raises Unrepresentable.
    """
    shipped_sections = configparser.RawConfigParser(strict=True)
    shipped_sections.read_string(_VARIABLE.sub(lambda match: variables[match[1]], shipped.read_text(encoding="utf-8")))
    common_environment = {"MQD_DATA_DIR": variables["MQD_DATA_DIR"]}
    keeper_environment = {"MQD_CONFIG": variables["MQD_CONFIG"], "MQD_WORKERS": variables["MQD_WORKERS"], **properties}
    out = configparser.RawConfigParser()
    for section in shipped_sections.sections():
        options = dict(shipped_sections[section])
        if section.startswith("program:"):
            role = section.removeprefix("program:mqd-")
            environment = common_environment
            if role == "keeper":
                environment = {
                    **common_environment,
                    **keeper_environment,
                    "MQD_RUN_SUPERVISOR": "own" if kind == "whole" else "other",
                }
            if kind == "include":
                section = f"program:{prefix}-{role}"
                options |= {"user": user, **(_KEEPER_OPTIONS if role == "keeper" else {})}
            options["environment"] = _environment(environment)
        elif kind == "include":
            continue
        out[section] = options
    text = io.StringIO()
    text.write(_HEAD.format(kind=kind))
    if kind == "include":
        # without the timer, which the acceptor starts when it is needed
        others = f"{prefix}-controller {prefix}-worker:* {prefix}-acceptor"
        text.write(_START_AND_STOP.format(keeper=f"{prefix}-keeper", others=others))
    text.write("\n")
    out.write(text)
    return text.getvalue().rstrip("\n") + "\n"
