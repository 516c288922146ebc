"""Shared by the commands: exit codes, errors, common options, output as text or JSON. Imports no
client library.
"""

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import msgspec

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"


class CliError(click.ClickException):
    """A failure in one line: the cause and the remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED):
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click's exceptions have one exit code per class


class OutputClosedError(Exception):
    """The reader of our output has closed it (mqd consume ... | head): not a failure, unlike a
    BrokenPipeError from another pipe.
    """


class Settings(msgspec.Struct, frozen=True):
    """The options that all commands share."""

    bootstrap: str = DEFAULT_BOOTSTRAP
    json: bool = False


def covers_local_broker(settings: Settings) -> bool:
    """Whether a command about a cluster also covers the broker of the default data directory."""
    from mqd.base.paths import default_data_dir

    return bool(os.environ.get("MQD_DATA_DIR")) or (
        settings.bootstrap == DEFAULT_BOOTSTRAP and default_data_dir().exists()
    )


def error_line(text: str) -> None:
    print("mqd: " + " ".join(text.split()), file=sys.stderr)


def explain(error: BaseException) -> tuple[str, int]:
    """(the error as one line, exit code)."""
    from mqd.base.property_values import ConfigError

    if isinstance(error, ConfigError):
        return str(error), EXIT_USAGE
    if type(error).__module__.startswith(("confluent_kafka", "cimpl")):
        from mqd.cli.librdkafka import explain_kafka

        return explain_kafka(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error), EXIT_FAILED
    return f"{type(error).__name__}: {error} (this is a bug in mqd; MQD_DEBUG=1 shows the traceback)", EXIT_FAILED


def is_interruption(error: BaseException) -> bool:
    """Whether the error is a Ctrl-C. Within a callback from librdkafka, its Python binding turns a
    KeyboardInterrupt into a SystemError.
    """
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt)
    )


def stop_when_interrupted(stop: threading.Event) -> None:
    """The first SIGINT or SIGTERM sets `stop`; a second signal ends the process, however long
    stopping takes.
    """

    def on_first_signal(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGINT, on_first_signal)
    signal.signal(signal.SIGTERM, on_first_signal)


def _use_client_config(_ctx: click.Context, _parameter: click.Parameter, file: str | None) -> None:
    """Sets MQD_CLIENT_CONFIG, for this process and those that it starts."""
    if file is not None:
        os.environ["MQD_CLIENT_CONFIG"] = file


def _use_profile(_ctx: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Sets the profile of this process and those that it starts. Eager, so that --client-config
    takes precedence if both are given. If --profile is given before the verb and after it, the
    second one counts.
    """
    if name is None:
        return
    from mqd.cli.profiles import store

    profile = store.get(name)
    if profile.client_config is not None and not os.path.isfile(profile.client_config):
        raise CliError(f"{profile.client_config} of profile {name} does not exist; use mqd profile add --replace")
    os.environ["MQD_BOOTSTRAP"] = profile.bootstrap
    os.environ["MQD_CLIENT_CONFIG"] = profile.client_config or ""


def profile_option(envvar: str | None = None) -> Callable[..., Any]:
    return click.option(
        "--profile",
        metavar="NAME",
        envvar=envvar,
        is_eager=True,
        expose_value=False,
        callback=_use_profile,
        help="Use this cluster and its credentials; see `mqd profile add`.  [env: MQD_PROFILE]",
    )


client_config_option = click.option(
    "--client-config",
    type=click.Path(exists=True, dir_okay=False),
    expose_value=False,
    callback=_use_client_config,
    help="Client's properties file: security.protocol, sasl.*, ssl.*.  [env: MQD_CLIENT_CONFIG]",
)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options -b, --format, --profile and --client-config, which may also come before the
    verb. `function` gets their values as its first argument, a Settings.
    """

    @click.option(
        "-b",
        "--bootstrap",
        metavar="HOST:PORT[,...]",
        help="Broker to query.  [env: MQD_BOOTSTRAP; default: 127.0.0.1:9092]",
    )
    @click.option(
        "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
    )
    @profile_option()
    @client_config_option
    @click.pass_context
    @functools.wraps(function)
    def command(
        ctx: click.Context, /, *args: Any, bootstrap: str | None, output_format: str | None, **kwargs: Any
    ) -> Any:
        outer = ctx.find_root().obj or {}
        bootstrap = bootstrap or outer.get("bootstrap") or os.environ.get("MQD_BOOTSTRAP") or DEFAULT_BOOTSTRAP
        settings = Settings(bootstrap, (output_format or outer.get("output_format")) == "json")
        return function(settings, *args, **kwargs)

    return command


def pairs(values: Iterable[str], option: str) -> dict[str, str]:
    """Returns KEY=VALUE arguments as a dictionary. Raises click.UsageError."""
    values_by_key: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.UsageError(f"{option} takes KEY=VALUE, not {text!r}")
        if key.strip() in values_by_key:
            raise click.UsageError(f"{option} contains {key.strip()} twice")
        values_by_key[key.strip()] = value
    return values_by_key


def completing(names: Callable[[str], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Shell completion from `names`, a function of the broker's address. If it fails, for example
    because the broker does not respond promptly, nothing is completed.
    """

    def complete(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        try:
            address = ctx.params.get("bootstrap") or os.environ.get("MQD_BOOTSTRAP") or DEFAULT_BOOTSTRAP
            return [name for name in names(address) if name.startswith(incomplete)]
        except Exception:
            return []

    return complete


@completing
def complete_topic(bootstrap: str) -> Iterable[str]:
    from mqd.cli.librdkafka import topic_names

    return topic_names(bootstrap, 1.0)


# -- output ----------------------------------------------------------------------------------------


def print_line(text: str) -> None:
    """Prints a line of output. Raises OutputClosedError."""
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise OutputClosedError from error


def emit_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of aligned columns under titles; numbers, and "-" in place of a number, are
    right-aligned.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(title), *(len(row[column]) for row in cells)]) for column, title in enumerate(titles)]
    numeric = []
    for column in range(len(titles)):
        numbers = [isinstance(row[column], int) for row in rows]
        numeric.append(
            any(numbers) and all(number or row[column] == "-" for number, row in zip(numbers, rows, strict=True))
        )
    return [
        "  ".join(
            text.rjust(width) if is_numeric else text.ljust(width)
            for text, width, is_numeric in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(titles), *cells]
    ]


def emit_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table. The output does not depend on whether stdout is a terminal."""
    for line in table(titles, rows):
        click.echo(line)


def human_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
