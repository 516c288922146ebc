"""`mqd tune` on faked machines: its findings, its changes, and their restoration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mqd.cli.common import CliError
from mqd.cli.machine import changes, settings, tune
from mqd.cli.machine.changes import Journal, JournalEntry
from mqd.cli.machine.settings import Setting
from mqd.cli.main import cli

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 4096                 files
Max locked memory         8388608              8388608              bytes
"""


class Machine:
    """/sys and /proc of a machine with four CPUs, a RAID of four disks below the broker, and Debian's defaults."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounted("ext4", "259:1", "/", "rw,relatime", "rw")
        self.mounted("xfs", "9:0", "/srv/my\\040data", "rw,noatime", "rw,sunit=1024,swidth=3072")
        self.disk("nvme0n1", "259:0", rotational="0", scheduler="[none] mq-deadline")
        self.write("sys/devices/block/nvme0n1/nvme0n1p1/partition", "1")
        self.link("259:1", "nvme0n1/nvme0n1p1")
        self.disk("md0", "9:0", rotational="1", scheduler="none")
        for name, value in {"level": "raid5", "raid_disks": "4", "chunk_size": "524288", "degraded": "0"}.items():
            self.write(f"sys/devices/block/md0/md/{name}", value)
        self.write("sys/devices/block/md0/md/stripe_cache_size", "256")
        (root / "sys/devices/block/md0/slaves").mkdir()
        for number in range(4):
            self.disk(f"sd{number}", f"8:{16 * number}", rotational="1", scheduler="mq-deadline kyber [bfq] none")
            (root / f"sys/devices/block/md0/slaves/sd{number}").symlink_to(f"../../sd{number}")
            self.write(f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor", "powersave")
            self.write(f"proc/irq/{30 + number}/smp_affinity_list", "0")
            self.write(f"sys/class/net/eth0/device/msi_irqs/{30 + number}", "msix")
        for path, value in {
            "proc/swaps": "Filename Type\n/dev/sda2 partition",
            "proc/self/limits": LIMITS,
            "proc/sys/vm/swappiness": "60",
            "proc/sys/vm/dirty_background_ratio": "10",
            "proc/sys/vm/dirty_background_bytes": "0",
            "proc/sys/vm/dirty_ratio": "20",
            "proc/sys/net/core/somaxconn": "128",
            "proc/sys/kernel/osrelease": "5.10.0-33-amd64",
            "proc/sys/kernel/io_uring_disabled": "2",
            "proc/sys/fs/inotify/max_user_instances": "128",
            "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet",
            "sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm",
            "sys/devices/system/node/node0/cpulist": "0-1",
            "sys/devices/system/node/node1/cpulist": "2-3",
        }.items():
            self.write(path, value)

        (self.root / "srv/my data/mqd").mkdir(parents=True)

    def write(self, path: str, value: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value + "\n")

    def read(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    def link(self, major_minor: str, name: str) -> None:
        link = self.root / "sys/dev/block" / major_minor
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../devices/block/{name}")

    def disk(self, name: str, major_minor: str, rotational: str, scheduler: str) -> None:
        queue = f"sys/devices/block/{name}/queue"
        self.write(f"{queue}/rotational", rotational)
        self.write(f"{queue}/scheduler", scheduler)
        self.write(f"{queue}/read_ahead_kb", "128")
        self.link(major_minor, name)

    def mounted(self, kind: str, device: str, place: str, options: str, of_system: str) -> None:
        file = self.root / "proc/self/mountinfo"
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as lines:
            lines.write(f"25 1 {device} / {place} {options} shared:1 - {kind} /dev/x {of_system}\n")

    def settings(self, directory: str = "/srv/my data/mqd") -> dict[str, Setting]:
        return {one.name: one for one in settings.read_settings(self.root, [Path(directory)])}

    def tune(self, *words: str) -> Result:
        journal = str(self.root / "journal.json")
        arguments = ["tune", "--root", str(self.root), "--journal", journal, "--data-dir", "/srv/my data/mqd", *words]
        return CliRunner().invoke(cli, arguments, standalone_mode=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_raid_with_the_defaults_of_a_distribution(machine: Machine) -> None:
    found = machine.settings()
    assert {name: (one.now, one.wanted) for name, one in found.items() if not one.is_good} == {
        **{f"sd{number}: I/O scheduler": ("bfq", "mq-deadline") for number in range(4)},
        **{f"sd{number}: read-ahead": ("128 KB", "2048 KB or more") for number in range(4)},
        "md0: read-ahead": ("128 KB", "3072 KB or more"),  # two stripes of three data disks
        "md0: stripe cache": ("256", "4096 or more"),
        "vm.swappiness": ("60", "1"),
        "vm.dirty_background_ratio": ("10 %", "5 % or less"),
        "transparent huge pages": ("always", "madvise"),
        "net.core.somaxconn": ("128", "4096 or more"),
        "eth0: interrupts": ("all of 4 on CPU 0", "spread over the CPUs"),
        "CPU governor": ("powersave", "performance"),
        "clock source": ("hpet", "tsc"),
        "limit: open files": ("4096", "100000 or more"),
        "limit: locked memory": ("8388608", "64 MiB or more"),
        "fs.inotify.max_user_instances": ("128", "512 or more"),
        "kernel.io_uring_disabled": ("2", "0"),
    }
    assert found["/srv/my data: stripe"].now == "1536 KB" == found["/srv/my data: stripe"].wanted
    assert "node 1: 2-3" in found["NUMA"].why
    assert not any(one.is_risk for one in found.values())
    assert not [name for name in found if name.startswith("nvme0n1")]  # not the broker's disks


def test_a_host_without_swap_may_have_any_swappiness(machine: Machine) -> None:
    machine.write("proc/swaps", "Filename Type Size Used Priority\n")
    found = machine.settings()["vm.swappiness"]
    assert found.is_good and (found.now, found.wanted) == ("60", "any (no swap)")


def test_a_data_directory_that_does_not_exist_is_refused(machine: Machine) -> None:
    done = machine.tune("--data-dir", "/srv/none")
    assert "/srv/none is not a directory" in str(done.exception)


def test_an_ssd_by_its_partition(machine: Machine) -> None:
    found = machine.settings("/home/me/mqd")
    assert found["/: access times"].is_good and found["nvme0n1: I/O scheduler"].is_good
    assert (found["nvme0n1: read-ahead"].now, found["nvme0n1: read-ahead"].is_good) == ("128 KB", False)


@pytest.mark.parametrize(
    ("kind", "said", "is_risk"),
    [
        ("tmpfs", "all records are lost when the machine restarts", True),
        ("btrfs", "it copies on write", False),
        ("nfs4", "the disk is across a network", False),
        ("cachefs9", "mqd has not been tested on cachefs9", False),
    ],
)
def test_a_file_system_that_is_not_known(machine: Machine, kind: str, said: str, is_risk: bool) -> None:
    machine.mounted(kind, "0:44", "/srv/my\\040data", "rw", "rw")  # over an existing mount
    one = machine.settings()["/srv/my data: file system"]
    assert not one.is_good and said in one.why and one.is_risk == is_risk and not one.writes


def test_settings_that_put_records_at_risk(machine: Machine) -> None:
    machine.mounted("ext4", "9:0", "/srv/my\\040data", "rw,noatime", "rw,barrier=0,stripe=384,discard")
    machine.write("sys/devices/block/md0/md/degraded", "1")
    found = machine.settings()
    assert {name for name, one in found.items() if one.is_risk} == {"/srv/my data: barriers", "md0: missing disks"}
    assert found["/srv/my data: stripe"].is_good  # 384 blocks of 4 KiB
    assert not found["/srv/my data: discard"].is_good
    assert machine.tune().output.count("RECORDS AT RISK") == 2


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_stripe_that_is_no_number_is_not_known(machine: Machine, kind: str) -> None:
    machine.mounted(kind, "9:0", "/srv/my\\040data", "rw,noatime", "rw,stripe=none,swidth=none")
    assert machine.settings()["/srv/my data: stripe"].now == "not known to the file system"


def test_a_machine_without_sysfs(tmp_path: Path) -> None:
    found = settings.read_settings(tmp_path, [Path("/srv")])
    assert [(one.name, one.now) for one in found] == [("/srv: file system", "not known")]


def test_the_disks_are_those_that_links_lead_to(machine: Machine, tmp_path: Path) -> None:
    config = tmp_path / "mqd.properties"
    (tmp_path / "data").symlink_to("/srv/my data/mqd")
    (tmp_path / "log").symlink_to("/srv/my data/log")
    config.write_text(f"log.dirs={tmp_path}/log\n")
    found = tune._directories(tmp_path / "data", config)
    assert found == [Path("/srv/my data/mqd"), Path("/srv/my data/log")]


def test_a_cpu_that_is_offline_gets_no_interrupts(machine: Machine) -> None:
    machine.write("sys/devices/system/cpu/cpu1/online", "1")
    machine.write("sys/devices/system/cpu/cpu2/online", "0")
    assert list(machine.settings()["eth0: interrupts"].writes.values()) == ["0", "1", "3", "0"]


def test_nothing_is_changed_unless_requested(machine: Machine) -> None:
    done = machine.tune()
    assert done.return_value == 1
    assert "swaps out" in done.output and "mqd tune --apply changes it" in done.output
    assert machine.read("proc/sys/vm/swappiness") == "60"
    shown = {one["setting"]: one for one in json.loads(machine.tune("--format", "json").output)}
    assert shown["vm.swappiness"]["ok"] is False and shown["vm.swappiness"]["how"] == "mqd tune --apply"


def test_apply_and_undo(machine: Machine) -> None:
    before = {path: path.read_text() for path in machine.root.rglob("*") if path.is_file()}
    applied = machine.tune("--apply")
    assert applied.exception is None, applied.output
    assert machine.read("proc/sys/vm/swappiness") == "1"
    assert machine.read("sys/devices/block/sd3/queue/scheduler") == "mq-deadline"
    assert machine.read("sys/devices/block/md0/md/stripe_cache_size") == "4096"
    assert [machine.read(f"proc/irq/{30 + number}/smp_affinity_list") for number in range(4)] == ["0", "1", "2", "3"]
    remain = {name for name, one in machine.settings().items() if not one.is_good}
    assert remain == {"limit: open files", "limit: locked memory", "kernel.io_uring_disabled"}
    assert "nothing to change" in machine.tune("--apply").output
    undone = machine.tune("--undo")
    assert undone.exception is None and not (machine.root / "journal.json").exists()
    for path, text in before.items():
        assert settings.selected_value(path.read_text().strip()) == settings.selected_value(text.strip()), path
    again = machine.tune("--undo")
    assert isinstance(again.exception, CliError) and "has no entry" in str(again.exception)


def test_undo_restores_the_first_value_and_leaves_later_changes_by_others(machine: Machine) -> None:
    machine.tune("--apply")
    machine.write("proc/sys/vm/swappiness", "90")
    machine.write("proc/sys/net/core/somaxconn", "200")
    machine.tune("--apply")  # both again
    machine.write("proc/sys/net/core/somaxconn", "8192")  # an operator's own
    undone = machine.tune("--undo")
    assert machine.read("proc/sys/vm/swappiness") == "60"
    assert machine.read("proc/sys/net/core/somaxconn") == "8192"
    assert "left at 8192: it was changed after mqd tune set 4096" in undone.output


def test_a_value_that_the_kernel_has_rounded_is_restored(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "sys/devices/block/md0/queue/read_ahead_kb"
    setting = machine.settings()["md0: read-ahead"]
    write = changes._write

    def rounds(file: Path, value: str) -> str:
        write(file, "3008")
        return "it is 3008 now"

    monkeypatch.setattr(changes, "_write", rounds)
    for _ in range(2):
        (outcome,) = changes.apply(machine.root, Journal(machine.root / "journal.json"), [setting])
        assert not outcome.done and machine.read(path) == "3008"
    monkeypatch.setattr(changes, "_write", write)
    machine.tune("--undo")
    assert machine.read(path) == "128"


def test_each_entry_is_on_disk_before_its_change(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(machine.root / "journal.json")

    def write(path: Path, _value: str) -> str:
        known = [one.path for one in Journal(journal.path).entries]
        assert "/" + str(path.relative_to(machine.root)) in known
        raise KeyboardInterrupt  # the machine stops here

    monkeypatch.setattr(changes, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        changes.apply(machine.root, journal, machine.settings().values())
    assert len(Journal(journal.path).entries) == 1


def test_changes_refused_by_the_kernel_are_reported_and_stay_in_the_journal(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.tune("--apply")
    monkeypatch.setattr(changes, "_write", lambda *_: "Device or resource busy")
    undone = machine.tune("--undo")
    assert isinstance(undone.exception, CliError) and "Device or resource busy" in str(undone.exception)
    assert "/proc/sys/vm/swappiness" in [one.path for one in Journal(machine.root / "journal.json").entries]


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/sys/../../etc/passwd", "/sysfoo", "etc/passwd"])
def test_a_journal_cannot_name_other_files(machine: Machine, path: str) -> None:
    (machine.root / "journal.json").write_text(json.dumps([JournalEntry(path, "root", "x")._asdict()]))
    undone = machine.tune("--undo")
    assert isinstance(undone.exception, CliError) and "is not a setting of the kernel" in str(undone.exception)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"path": 3}]', "[[]]"])
def test_a_damaged_journal_is_refused(machine: Machine, text: str) -> None:
    (machine.root / "journal.json").write_text(text)
    applied = machine.tune("--apply")
    assert isinstance(applied.exception, CliError) and "journal.json" in str(applied.exception)
    assert machine.read("proc/sys/vm/swappiness") == "60"
