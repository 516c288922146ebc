"""The command `mqd NOUN VERB`. This module contains only the names of the commands; their modules
are imported when a command is called, so that `mqd --help` takes far less than 150 ms.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no broker reached, 130 interrupted.
"""

import difflib
import importlib
import os
import select
import sys
from typing import Any

import click

from mqd import __version__
from mqd.cli.common import EXIT_FAILED as EXIT_FAILED
from mqd.cli.common import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    OutputClosedError,
    client_config_option,
    error_line,
    explain,
    is_interruption,
    profile_option,
)
from mqd.cli.common import CliError as CliError

# name -> (module that has a click command `command`, help shown without importing it)
COMMANDS = {
    "up": ("mqd.cli.verbs.up", "Start a broker in the foreground."),
    "down": ("mqd.cli.verbs.down", "Stop a broker."),
    "status": ("mqd.cli.verbs.status", "Show a broker's processes, ports and partitions."),
    "doctor": ("mqd.cli.verbs.doctor", "List problems, the most harmful first, and how to fix them."),
    "top": ("mqd.cli.verbs.top", "Show rates, lag, slow partitions and hosts, live."),
    "log-level": ("mqd.cli.verbs.log_level", "Change how much a running broker logs."),
    "cluster": ("mqd.cli.verbs.cluster", "Hosts, controllers and the key of a cluster."),
    "topic": ("mqd.cli.verbs.topic", "Create, list, describe, alter and delete topics."),
    "config": ("mqd.cli.verbs.config", "Show and change the configuration of topics and brokers."),
    "group": ("mqd.cli.verbs.group", "List, describe and delete consumer groups, and move their offsets."),
    "queue": ("mqd.cli.redrive.command", "Move dead letters back to the topics they came from."),
    "txn": ("mqd.cli.verbs.txn", "List, describe and abort transactions; find hanging ones."),
    "quota": ("mqd.cli.verbs.quota", "Show and change the quotas of clients, users and addresses."),
    "acl": ("mqd.cli.verbs.acl", "Allow or deny what clients do, show why, and test the rules."),
    "user": ("mqd.cli.verbs.user", "Create, list and delete users that authenticate with a password."),
    "token": ("mqd.cli.verbs.token", "Create, list, renew and expire delegation tokens."),
    "service": ("mqd.cli.service.command", "Run a broker as a systemd service."),
    "monitoring": ("mqd.cli.verbs.monitoring", "Write alerts for Prometheus and dashboards for Grafana."),
    "otel": ("mqd.cli.otlp.command", "Send a broker's metrics to an OpenTelemetry collector."),
    "console": ("mqd.console.command", "Serve a web console for the cluster: topics, messages, groups."),
    "profile": ("mqd.cli.profiles.command", "Names for clusters and their credentials."),
    "client-config": (
        "mqd.cli.verbs.client_config",
        "Write the settings that a client needs to connect to the cluster.",
    ),
    "key": ("mqd.cli.verbs.key", "Key files with which clients encrypt values."),
    "cert": ("mqd.cli.verbs.cert", "Certificates of a secured broker."),
    "produce": ("mqd.cli.verbs.produce", "Write lines or files to a topic."),
    "consume": ("mqd.cli.verbs.consume", "Read the records of a topic."),
    "cat": ("mqd.cli.verbs.cat", "Read, write and list with kcat's options."),
    "log": ("mqd.cli.verbs.log", "Dump and verify segment files."),
    "sql": ("mqd.cli.verbs.sql", "Query topics with Spark SQL."),
    "pipeline": ("mqd.cli.verbs.pipeline", "Run a data pipeline on Spark."),
    "size": ("mqd.cli.verbs.size", "Compute the disk, network, cores, memory and hosts that a load needs."),
    "bench": ("mqd.cli.machine.bench", "Measure this machine's disks before a broker runs on it."),
    "tune": ("mqd.cli.machine.tune", "Check whether this machine's settings suit a broker, and change them."),
    "demo": ("mqd.cli.verbs.demo", "Stream 336,776 flights through a broker and check them."),
    "demo-spark": (
        "mqd.cli.verbs.demo_spark",
        "Stream the flights through Spark, too: delays per airport and hour, and a picture.",
    ),
    "completion": ("mqd.cli.verbs.completion", "Print a shell's completion script."),
}


class LazyGroup(click.Group):
    """A group whose members are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        command.name = cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            suggestions = difflib.get_close_matches(args[0], COMMANDS, n=1)
            raise click.UsageError(
                f"there is no command {args[0]!r}"
                + (f"; did you mean {suggestions[0]}?" if suggestions else "; mqd --help lists all commands"),
                ctx,
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click itself would exit with code 1 and no message
            if _has_no_reader():
                raise OutputClosedError from error
            raise CliError(explain(error)[0]) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _has_no_reader() -> bool:
    """Whether the reader of stdout has closed it. A flush would not always detect that, because the
    buffer may already be empty.
    """
    poller = select.poll()
    try:
        poller.register(sys.stdout, 0)
    except (OSError, TypeError, ValueError):  # stdout is closed, or has no file descriptor
        return False
    return bool(poller.poll(0))


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"mqd {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-b",
    "--bootstrap",
    metavar="HOST:PORT",
    help="Broker to query (also after the verb).  [env: MQD_BOOTSTRAP; default: 127.0.0.1:9092]",
)
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output (also after the verb)."
)
@profile_option("MQD_PROFILE")
@client_config_option
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context, bootstrap: str | None, output_format: str | None) -> None:
    """A message queue that speaks the Kafka protocol.

    mqd up starts a broker; mqd demo shows one at work.
    """
    ctx.obj = {"bootstrap": bootstrap, "output_format": output_format}


def _run(arguments: list[str] | None) -> int:
    try:
        outcome = cli.main(args=arguments, prog_name="mqd", standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except click.UsageError as error:
        usage = f" (try: {error.ctx.command_path} --help)" if error.ctx else ""
        error_line(error.format_message().rstrip(".") + usage)
        return EXIT_USAGE
    except click.ClickException as error:
        error_line(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except (OutputClosedError, BrokenPipeError):
        # redirect stdout so that the interpreter's last flush is quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if is_interruption(error):
            return EXIT_INTERRUPTED
        if os.environ.get("MQD_DEBUG") == "1":
            raise
        text, code = explain(error)
        error_line(text)
        return code


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `mqd` command and of `python -m mqd.cli.main`."""
    sys.exit(_run(arguments))


if __name__ == "__main__":
    main()
