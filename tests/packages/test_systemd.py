"""The wheel as a service of a real systemd: installed, ready when it serves, watched, and stopped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.systemd_machine import LIMIT_S, SystemdMachine
from tests.polling import eventually

ROOT = Path(__file__).parents[2]
EXPOSURE_MAX = 3.0
WATCHDOG_S = 10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdMachine]:
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(ROOT)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    (wheel,) = made.glob("mqd-*.whl")
    with SystemdMachine(tmp_path_factory.mktemp("machine"), wheel) as running:
        yield running


@pytest.fixture
def service(machine: SystemdMachine) -> SystemdMachine:
    """The machine with the service installed and started, whichever tests have run before."""
    if shown(machine, "LoadState") != ["loaded"]:
        machine.run("mqd", "service", "install")
    machine.run("systemctl", "start", "mqd")
    return machine


def shown(machine: SystemdMachine, *properties: str) -> list[str]:
    lines = machine.run("systemctl", "show", "mqd.service", f"--property={','.join(properties)}").splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    return [found[name] for name in properties]


def processes(machine: SystemdMachine) -> dict[str, int]:
    about = json.loads(machine.run("mqd", "status", "--data-dir", "/var/lib/mqd", "--format", "json"))
    return {one["name"]: one["pid"] for one in about["processes"]}


def test_a_service_from_its_installation_to_its_removal(machine: SystemdMachine) -> None:
    machine.run("mqd", "service", "uninstall", checked=False)
    assert "systemctl start mqd" in machine.run("mqd", "service", "install")
    assert shown(machine, "LoadState", "ActiveState", "UnitFileState") == ["loaded", "inactive", "enabled"]

    machine.run("systemctl", "start", "mqd")  # returns when it has reported that it is ready
    assert shown(machine, "Type", "ActiveState", "SubState", "NRestarts") == ["notify", "active", "running", "0"]
    assert "mqd.service is active (running)" in machine.run("mqd", "service", "status")
    machine.run("bash", "-c", "seq 100 | mqd produce numbers")
    read = machine.run("mqd", "consume", "numbers", "--exit-at-end")
    assert read.split() == [str(number) for number in range(1, 101)]

    owner = machine.run("stat", "--format=%U %a", "/var/lib/mqd").split()
    assert owner == ["mqd", "700"]
    users = machine.run("ps", "-o", "user=", "-p", ",".join(map(str, processes(machine).values())))
    assert set(users.split()) == {"mqd"}

    exposure = machine.run("systemd-analyze", "security", "--no-pager", "mqd.service")
    (level,) = re.findall(r"Overall exposure level for mqd.service: (\d+\.\d+)", exposure)
    assert float(level) <= EXPOSURE_MAX, exposure

    machine.run("systemctl", "stop", "mqd")
    assert shown(machine, "ActiveState", "Result") == ["inactive", "success"]
    machine.run("systemctl", "start", "mqd")
    assert machine.run("mqd", "consume", "numbers", "--exit-at-end").split()[-1] == "100"


def test_a_service_that_hangs_is_restarted_by_the_watchdog(service: SystemdMachine) -> None:
    service.run("bash", "-c", "seq 100 | mqd produce watched")
    place = "/etc/systemd/system/mqd.service.d"
    service.run("mkdir", "-p", place)
    service.run("bash", "-c", f"printf '[Service]\\nWatchdogSec={WATCHDOG_S}\\n' > {place}/watchdog.conf")
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "restart", "mqd")
    time.sleep(2 * WATCHDOG_S)  # fed: this can only be observed over time
    assert shown(service, "ActiveState", "NRestarts") == ["active", "0"]
    before = processes(service)
    service.run("kill", "-STOP", str(before["mqd-keeper"]))

    def is_back() -> bool:
        return shown(service, "ActiveState", "NRestarts") == ["active", "1"]

    eventually(is_back, lambda: f"a restart by the watchdog: {service.run('journalctl', '-u', 'mqd', '-n', '30')}", 180)
    assert "mqd.service: Watchdog timeout" in service.console
    assert not set(processes(service).values()) & set(before.values())
    assert service.run("mqd", "consume", "watched", "--exit-at-end").split()[-1] == "100"


def test_a_removed_service_keeps_its_data(service: SystemdMachine) -> None:
    assert "its data and its user stay" in service.run("mqd", "service", "uninstall")
    assert "there is no mqd.service" in service.run("mqd", "service", "status", checked=False)
    assert service.run("ls", "/var/lib/mqd/log")
