"""`mqd service`: a broker as a systemd service."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError, emit_json, error_line
from mqd.cli.service import unit as service_unit

UNITS = Path("/etc/systemd/system")
DATA_DIR = Path("/var/lib/mqd")
SYSTEM_UID_MAX = 999  # for higher uids, systemd-logind removes a user's shared memory when the user logs out
_SHOWN_PROPERTIES = ("LoadState", "ActiveState", "SubState", "MainPID", "NRestarts", "StatusText", "Result")

name_option = click.option(
    "--name", default="mqd", show_default=True, metavar="NAME", help="Name of the service: NAME.service."
)


def _check_name(name: str) -> str:
    if not service_unit.NAME_PATTERN.fullmatch(name):
        raise click.UsageError(f"--name takes letters, digits, - and _, not {name!r}")
    return name


def _program() -> list[str]:
    """The command of this installation's `mqd`, with an absolute path."""
    script = Path(sys.executable).with_name("mqd")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "mqd.cli.main"]


def _run(*command: str) -> str:
    """Raises CliError."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CliError(f"there is no {command[0]} here; --print writes the unit, to be installed by hand") from error
    if result.returncode:
        raise CliError(f"{' '.join(command)}: {result.stderr.strip() or f'exit status {result.returncode}'}")
    return result.stdout


def _require_root() -> None:
    if os.geteuid() != 0:
        raise CliError("this needs root; --print writes the unit, to be read or installed by hand")


def _create_user(name: str, data_dir: Path) -> None:
    """Creates the system user, unless it exists."""
    try:
        uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        nologin = shutil.which("nologin") or "/usr/sbin/nologin"
        _run("useradd", "--system", "--user-group", "--home-dir", str(data_dir), "--shell", nologin, name)
        return
    if uid > SYSTEM_UID_MAX:
        error_line(
            f"{name} (uid {uid}) is not a system user: when it logs out, systemd-logind removes its shared memory while"
            " the broker runs, unless logind.conf sets RemoveIPC=no; use a user created with useradd --system instead"
        )


def _other_log_dirs(config_file: Path | None, data_dir: Path) -> list[Path]:
    from mqd.base.config import load_broker

    config = load_broker(config_file, {}, {})
    log_dirs = [Path(path.strip()) for path in config.get("log.dirs", "").split(",") if path.strip()]
    return [path for path in log_dirs if path.is_absolute() and not path.is_relative_to(data_dir)]


def _readable_paths(program: list[str], config_file: Path | None) -> list[Path]:
    """The paths that the service must be able to read: its program, the base Python installation (a
    virtual environment links to it) and the configuration.
    """
    paths = [Path(program[0]), Path(sys.base_prefix), *([config_file] if config_file is not None else [])]
    return [*paths, *(path.resolve() for path in paths)]


def _make_directories(user: str, directories: list[Path]) -> None:
    """Creates missing directories: systemd refuses to start a unit that names directories which do
    not exist.
    """
    for directory in directories:
        if directory.exists():
            continue
        try:
            directory.mkdir(0o700, parents=True)
            shutil.chown(directory, user, user)
        except (OSError, LookupError) as error:  # LookupError: there is no group of this name
            raise CliError(f"{directory}: {error}") from error


@click.group(short_help="Run a broker as a systemd service.")
def command() -> None:
    """Run a broker as a systemd service: it starts with the host, is reported ready when it accepts
    requests, is restarted when it fails or hangs, and can write only to its own directories.
    """


@command.command(short_help="Write and enable the unit.")
@name_option
@click.option(
    "--user",
    default="mqd",
    show_default=True,
    help="User that the broker runs as; a system user, created if it does not exist.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=DATA_DIR,
    show_default=True,
    help="The broker's data directory.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Properties file, read at each start.",
)
@click.option("--secure", "secured", is_flag=True, help="As in mqd up --secure: certificates, users and permissions.")
@click.option("--print", "print_only", is_flag=True, help="Write the unit to standard output, and change nothing.")
def install(name: str, user: str, data_dir: Path, config_file: Path | None, secured: bool, print_only: bool) -> None:
    """Write the unit, create its user, and enable the service without starting it.

    Put settings into the file named by --config. To change options, run this command again.
    """
    data_dir = Path(os.path.abspath(data_dir))
    config_file = config_file.absolute() if config_file is not None else None
    program, other_log_dirs = _program(), _other_log_dirs(config_file, data_dir)
    start = [*program, "up", "--data-dir", str(data_dir)]
    start += ["--config", str(config_file)] if config_file is not None else []
    start += ["--secure"] if secured else []
    text = service_unit.unit(
        _check_name(name), user, data_dir, start, other_log_dirs, _readable_paths(program, config_file)
    )
    if print_only:
        click.echo(text, nl=False)
        return
    _require_root()
    _create_user(user, data_dir)
    _make_directories(user, service_unit.required_dirs(data_dir, other_log_dirs))
    path = UNITS / f"{name}.service"
    try:
        path.write_text(text)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", f"{name}.service")
    click.echo(f"wrote and enabled {path}\nstart it: systemctl start {name}\nshow it: mqd service status --name {name}")


@command.command(short_help="Stop the service and remove its unit; the data stays.")
@name_option
def uninstall(name: str) -> None:
    """Stop the service and remove its unit. Its data directory and its user stay."""
    _check_name(name)
    _require_root()
    path = UNITS / f"{name}.service"
    if not path.exists():
        raise CliError(f"there is no {path}; mqd service install writes it")
    _run("systemctl", "disable", "--now", f"{name}.service")
    path.unlink()
    _run("systemctl", "daemon-reload")
    click.echo(f"stopped {name} and removed {path}; its data and its user stay")


@command.command(short_help="Show systemd's view of the service.")
@name_option
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
)
@click.pass_context
def status(ctx: click.Context, name: str, output_format: str | None) -> int:
    """Show systemd's view of the service. `mqd status` shows more about the broker.

    Exit status: 0 if the service is running, 1 if it is starting, stopping or has failed, 3 if it
    is not running or does not exist.
    """
    unit = f"{_check_name(name)}.service"
    text = _run("systemctl", "show", unit, f"--property={','.join(_SHOWN_PROPERTIES)}")
    properties: dict[str, Any] = dict(line.partition("=")[::2] for line in text.splitlines())
    if (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json":
        emit_json({"unit": unit, **properties})
    elif properties.get("LoadState") != "loaded":
        click.echo(f"there is no {unit}; mqd service install writes it")
    else:
        process = f", process {properties['MainPID']}" if properties.get("MainPID", "0") != "0" else ""
        result = f", {properties['Result']}" if properties.get("Result", "success") != "success" else ""
        click.echo(f"{unit} is {properties['ActiveState']} ({properties['SubState']}{result}){process}")
        click.echo(
            f"restarted by systemd {properties.get('NRestarts') or 0} times;"
            f" {properties.get('StatusText') or 'no status text'}"
        )
    state = properties.get("ActiveState")
    return 0 if state == "active" else EXIT_UNREACHABLE if state in ("inactive", None) else EXIT_FAILED
