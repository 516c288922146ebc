"""`mqd service`: its unit, checked by systemd, and its calls to a fake systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mqd.cli.common import CliError
from mqd.cli.main import cli
from mqd.cli.service import command as service
from mqd.cli.service import unit as service_unit

EXPOSURE_MAX = 3.0


def called(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["service", *arguments])


def settings(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if re.match(r"\w+=", line))


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Root, a directory for units, and the commands that were run."""
    commands: list[str] = []

    def run(*command: str) -> str:
        commands.append(" ".join(command[:3]))
        shown = (
            "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=7\nNRestarts=2\n"
            "StatusText=every process answers\nResult=success\n"
        )
        return shown if command[1] == "show" else ""

    monkeypatch.setattr(service, "_run", run)
    monkeypatch.setattr(service, "UNITS", tmp_path)
    monkeypatch.setattr(service.os, "geteuid", lambda: 0)
    return commands


@pytest.mark.parametrize("data_dir", ["/var/lib/mqd", "/var/lib/a b", "/srv/a b", "/srv/$a", "/home/me/mqd"])
def test_systemd_understands_the_unit_and_finds_it_confined(tmp_path: Path, data_dir: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    config = tmp_path / "100%.properties"
    config.write_text("log.dirs=/disk1,/disk2\n")
    printed = called("install", "--print", "--data-dir", data_dir, "--user", "root", "--config", str(config))
    assert printed.exit_code == 0
    unit = tmp_path / "mqd.service"
    program = settings(printed.output)["ExecStart"].split()[0]
    unit.write_text(printed.output.replace(f"ExecStart={program}", "ExecStart=/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)], capture_output=True, text=True, timeout=60
    )
    found = re.search(r"Overall exposure level for mqd.service: ([\d.]+)", judged.stdout)
    assert found is not None and float(found[1]) <= EXPOSURE_MAX, judged.stdout


def test_the_settings_of_the_unit() -> None:
    found = settings(called("install", "--print", "--secure").output)
    assert found["Type"] == "notify" and found["NotifyAccess"] == "main" and found["LimitNOFILE"] == "1048576"
    assert found["StateDirectory"] == "mqd" and "ReadWritePaths" not in found
    assert found["ExecStart"].endswith(" up --data-dir /var/lib/mqd --secure")
    assert Path(found["ExecStart"].split()[0]).is_absolute()
    # the broker's own watchdog kills a hung process after a minute
    assert int(found["WatchdogSec"]) == 120


def test_directories_elsewhere_are_writable(tmp_path: Path) -> None:
    text = service_unit.unit("mqd", "mqd", Path("/srv/mqd"), ["/bin/mqd"], [Path("/disk 1"), Path("/srv/mqd/log")])
    assert [line for line in text.splitlines() if line.startswith("ReadWritePaths")] == [
        "ReadWritePaths=/srv/mqd",
        'ReadWritePaths="/disk 1"',
    ]
    assert "StateDirectory" not in settings(text)


@pytest.mark.parametrize(
    ("word", "quoted"), [("/a-b.c", "/a-b.c"), ("a b", '"a b"'), ("100%", "100%%"), ("$x", "$$x"), ('"', '"\\""')]
)
def test_words_are_quoted_for_systemd(word: str, quoted: str) -> None:
    assert service_unit.quoted(word) == quoted


@pytest.mark.parametrize(
    ("data_dir", "line"),
    [
        ("/var/lib/mq data", 'StateDirectory="mq data"'),
        ("/var/lib/50%", "StateDirectory=50%%"),
        ("/srv/$x", "ReadWritePaths=/srv/$x"),  # only lines of commands expand variables
        ("/srv/50% of it", 'ReadWritePaths="/srv/50%% of it"'),
    ],
)
def test_directories_are_quoted_for_systemd(data_dir: str, line: str) -> None:
    assert line in service_unit.unit("mqd", "mqd", Path(data_dir), ["/bin/mqd"]).splitlines()


@pytest.mark.parametrize("below_home", ["program", "configuration", "interpreter", ""])
def test_the_service_can_read_its_program_and_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below_home: str
) -> None:
    places = {name: tmp_path / ("home" if name == below_home else "opt") for name in ("program", "interpreter")}
    config = tmp_path / ("home" if below_home == "configuration" else "etc") / "mqd.properties"
    config.parent.mkdir()
    config.touch()
    monkeypatch.setattr(service_unit, "HOMES", (tmp_path / "home",))
    monkeypatch.setattr(service, "_program", lambda: [str(places["program"] / "mqd")])
    monkeypatch.setattr(sys, "base_prefix", str(places["interpreter"]))
    printed = called("install", "--print", "--config", str(config))
    assert settings(printed.output)["ProtectHome"] == ("read-only" if below_home else "yes")


def test_directories_that_systemd_does_not_make_are_made(
    tmp_path: Path, systemd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[tuple[Path, str]] = []
    monkeypatch.setattr(service.shutil, "chown", lambda path, user, group: owners.append((path, user)))
    config, data_dir, other = tmp_path / "mqd.properties", tmp_path / "a/data", tmp_path / "log"
    config.write_text(f"log.dirs={other},{tmp_path}/present\n")
    (tmp_path / "present").mkdir()
    done = called("install", "--user", "root", "--data-dir", str(data_dir), "--config", str(config))
    assert done.exit_code == 0, done.output
    assert owners == [(data_dir, "root"), (other, "root")]
    assert data_dir.stat().st_mode & 0o777 == other.stat().st_mode & 0o777 == 0o700


def test_install_and_uninstall(tmp_path: Path, systemd: list[str]) -> None:
    done = called("install", "--name", "mqd-2", "--user", "no-such-user")
    assert done.exit_code == 0 and (tmp_path / "mqd-2.service").read_text().startswith("# Written by")
    assert systemd == ["useradd --system --user-group", "systemctl daemon-reload", "systemctl enable mqd-2.service"]
    systemd.clear()
    assert called("uninstall", "--name", "mqd-2").exit_code == 0
    assert (
        systemd == ["systemctl disable --now", "systemctl daemon-reload"] and not (tmp_path / "mqd-2.service").exists()
    )
    assert isinstance(called("uninstall", "--name", "mqd-2").exception, SystemExit | CliError)


def test_status(systemd: list[str]) -> None:
    assert called("status").output.splitlines() == [
        "mqd.service is active (running), process 7",
        "restarted by systemd 2 times; every process answers",
    ]


def test_invalid_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "letters, digits" in called("install", "--print", "--name", "../x").output
    monkeypatch.setattr(service.os, "geteuid", lambda: 1000)
    assert "this needs root" in called("install").output


def test_a_login_user_causes_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(service.pwd, "getpwnam", lambda name: type("Entry", (), {"pw_uid": 1000}))
    service._create_user("me", Path("/var/lib/mqd"))
    assert "RemoveIPC" in capsys.readouterr().err
