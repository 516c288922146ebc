"""`mqd log-level`: how much a running broker logs. A change takes effect immediately in all of the
broker's processes, and lasts until the broker is restarted.
"""

from __future__ import annotations

from pathlib import Path

import click

from mqd.base.logging import SYSLOG_OF_LEVEL
from mqd.base.paths import default_data_dir, layout
from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError, emit_json


@click.command(short_help="Change how much a running broker logs.")
@click.argument("level", required=False, type=click.Choice(list(SYSLOG_OF_LEVEL)))
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The broker's data directory.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
)
@click.pass_context
def command(ctx: click.Context, level: str | None, data_dir: Path | None, output_format: str | None) -> int:
    """Show or change the log level of a running broker. After a restart, logging.level of its
    configuration applies again.
    """
    from mqd.shm.attach import KeeperDenied, KeeperError
    from mqd.shm.keeper_messages import SetLogLevel
    from mqd.shm.tools import KeeperConnection

    paths = layout(data_dir or default_data_dir())
    try:
        tool = KeeperConnection(paths.data_dir)
    except KeeperDenied as error:
        raise CliError(str(error), EXIT_FAILED) from error
    except KeeperError as error:
        raise CliError(f"no broker is running in {paths.data_dir}", EXIT_UNREACHABLE) from error
    try:
        with tool:
            status = tool.request(SetLogLevel(level)) if level else tool.status()
    except KeeperError as error:
        raise CliError(str(error), EXIT_FAILED) from error
    if (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json":
        emit_json({"log_level": status.log_level})
    else:
        click.echo(status.log_level)
    return 0
