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
_SHOWN = ("LoadState", "ActiveState", "SubState", "MainPID", "NRestarts", "StatusText", "Result")

name_option = click.option(
    "--name", default="mqd", show_default=True, metavar="NAME", help="Name of the service: NAME.service."
)


def _check_name(name: str) -> str:
    if not service_unit.NAME.fullmatch(name):
        raise click.UsageError(f"--name takes letters, digits, - and _, not {name!r}")
    return name


def _program() -> list[str]:
    """The command of this installation's `mqd`, with an absolute path."""
    script = Path(sys.executable).with_name("mqd")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "mqd.cli.main"]


def _run(*command: str) -> str:
    """Raises CliError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CliError(f"there is no {command[0]} here; --print writes the unit, to be installed by hand") from error
    if done.returncode:
        raise CliError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _need_root() -> None:
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
            " the broker runs, unless RemoveIPC=no in logind.conf; use one created by useradd --system instead"
        )


def _other_log_dirs(config_file: Path | None, data_dir: Path) -> list[Path]:
    from mqd.base.config import load_broker

    config = load_broker(config_file, {}, {})
    found = [Path(one.strip()) for one in config.get("log.dirs", "").split(",") if one.strip()]
    return [one for one in found if one.is_absolute() and not one.is_relative_to(data_dir)]


def _read_paths(program: list[str], config_file: Path | None) -> list[Path]:
    """What the service reads: its program, the interpreter, whose installation a virtual environment
    links to, and the configuration.
    """
    found = [Path(program[0]), Path(sys.base_prefix), *([config_file] if config_file is not None else [])]
    return [*found, *(one.resolve() for one in found)]


def _make_directories(user: str, directories: list[Path]) -> None:
    """Makes those that do not exist: systemd refuses to start a unit that names missing ones."""
    for directory in directories:
        if directory.exists():
            continue
        try:
            directory.mkdir(0o700, parents=True)
            shutil.chown(directory, user, user)
        except (OSError, LookupError) as error:  # LookupError: there is no group of this name
            raise CliError(f"{directory}: {error}") from error


@click.group(short_help="Run a broker as a service of systemd.")
def command() -> None:
    """Run a broker as a service of systemd: it starts with the host, is reported ready when it
    accepts requests, is restarted when it fails or hangs, and can write only to its own directories.
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
@click.option("--print", "prints", is_flag=True, help="Write the unit to standard output and change nothing.")
def install(name: str, user: str, data_dir: Path, config_file: Path | None, secured: bool, prints: bool) -> None:
    """Write the unit, make its user, and enable it; it is not started.

    Put settings into the file named by --config. To change options, run this command again.
    """
    data_dir = Path(os.path.abspath(data_dir))
    config_file = config_file.absolute() if config_file is not None else None
    program, others = _program(), _other_log_dirs(config_file, data_dir)
    start = [*program, "up", "--data-dir", str(data_dir)]
    start += ["--config", str(config_file)] if config_file is not None else []
    start += ["--secure"] if secured else []
    text = service_unit.unit(_check_name(name), user, data_dir, start, others, _read_paths(program, config_file))
    if prints:
        click.echo(text, nl=False)
        return
    _need_root()
    _create_user(user, data_dir)
    _make_directories(user, service_unit.required_dirs(data_dir, others))
    path = UNITS / f"{name}.service"
    try:
        path.write_text(text)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from error
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", f"{name}.service")
    click.echo(f"wrote and enabled {path}\nstart it: systemctl start {name}\nshow it: mqd service status --name {name}")


@command.command(short_help="Stop it and remove the unit; the data stays.")
@name_option
def uninstall(name: str) -> None:
    """Stop the service and remove its unit. Its data directory and its user stay."""
    _check_name(name)
    _need_root()
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

    Exit status: 0 it runs, 1 it is starting, stopping or has failed, 3 it does not run or there is
    no such service.
    """
    unit = f"{_check_name(name)}.service"
    text = _run("systemctl", "show", unit, f"--property={','.join(_SHOWN)}")
    about: dict[str, Any] = dict(line.partition("=")[::2] for line in text.splitlines())
    if (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json":
        emit_json({"unit": unit, **about})
    elif about.get("LoadState") != "loaded":
        click.echo(f"there is no {unit}; mqd service install writes it")
    else:
        process = f", process {about['MainPID']}" if about.get("MainPID", "0") != "0" else ""
        result = f", {about['Result']}" if about.get("Result", "success") != "success" else ""
        click.echo(f"{unit} is {about['ActiveState']} ({about['SubState']}{result}){process}")
        click.echo(
            f"restarted by systemd {about.get('NRestarts') or 0} times; {about.get('StatusText') or 'no status text'}"
        )
    state = about.get("ActiveState")
    return 0 if state == "active" else EXIT_UNREACHABLE if state in ("inactive", None) else EXIT_FAILED
