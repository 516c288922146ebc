"""The command line without a broker: lazy imports, exit codes, one-line errors, completion,
start-up time.
"""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from mqd.base.paths import layout
from mqd.cli import librdkafka
from mqd.cli import main as main_module
from mqd.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE, EXIT_USAGE, CliError, explain, pairs
from mqd.cli.main import COMMANDS, cli
from mqd.cli.verbs import config, quota
from mqd.cli.verbs.up import _check_paths
from tests.ports import free_port
from tests.unit.cli.unread_stdout import unread

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQD_")}
    return subprocess.run(
        [sys.executable, "-m", "mqd.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean | environment,
        timeout=60,
    )


@pytest.fixture
def closed_port() -> int:
    return free_port()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_exists_and_has_help(name, capsys):
    assert main_module._run([name, "--help"]) == 0
    assert "Usage: mqd " + name in capsys.readouterr().out


def test_the_help_lists_every_command_and_imports_none():
    code = (
        "import sys\nfrom mqd.cli.main import _run\n_run(['--help'])\nprint(sorted(m for m in sys.modules if"
        " m.startswith('mqd.') or m in ('confluent_kafka', 'rich', 'asyncio')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    # mqd.client: `import mqd` installs the finder of confluent_kafka's names, which imports nothing
    assert shown.splitlines()[-1] == str(
        ["mqd.cli", "mqd.cli.common", "mqd.cli.main", "mqd.client", "mqd.client.confluent"]
    )
    assert all(name in shown for name in COMMANDS)


def test_start_up_is_cheap():
    """CPU time of the child, on which load of the machine has little effect. The documented limit
    is 150 ms of wall time on an idle one.
    """

    def cpu_s(*arguments: str) -> float:
        before = os.times()
        run(*arguments)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_s("--help") for _ in range(3)) < 0.15


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "list"],
        ["topic", "create", "t"],
        ["topic", "describe", "t"],
        ["config", "get", "topic/t"],
        ["consume", "t"],
        ["produce", "t"],
        ["topic", "delete", "t"],
    ],
)
def test_without_a_broker_the_exit_code_is_3_with_a_remedy(arguments, closed_port, capsys):
    assert main_module._run([*arguments, "-b", f"127.0.0.1:{closed_port}"]) == EXIT_UNREACHABLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert (
        f"cannot reach a broker at 127.0.0.1:{closed_port}" in captured.err and "start one with: mqd up" in captured.err
    )


@pytest.mark.parametrize(
    "arguments, bound",
    [
        (("create", "t", "-p", "10000000"), 100_000),
        (("create", "t", "-r", "10000000"), 10_000),
        (("add-partitions", "t", "--to", "10000000"), 100_000),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_bound(arguments, bound, closed_port, capsys):
    assert main_module._run(["topic", *arguments, "-b", f"127.0.0.1:{closed_port}"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"10000000 is not in the range 1<=x<={bound}" in error


def test_the_bounds_are_librdkafkas():
    from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

    from mqd.cli.verbs.topic import _PARTITIONS_MAX, _REPLICAS_MAX

    admin = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    admin.create_topics([NewTopic("t", num_partitions=_PARTITIONS_MAX, replication_factor=_REPLICAS_MAX)])
    admin.create_partitions([NewPartitions("t", _PARTITIONS_MAX)])
    with pytest.raises(ValueError, match="num_partitions out of expected range"):
        admin.create_topics([NewTopic("t", num_partitions=_PARTITIONS_MAX + 1)])
    with pytest.raises(ValueError, match="replication_factor out of expected range"):
        admin.create_topics([NewTopic("t", num_partitions=1, replication_factor=_REPLICAS_MAX + 1)])
    with pytest.raises(ValueError, match="new_total_cnt out of expected range"):
        admin.create_partitions([NewPartitions("t", _PARTITIONS_MAX + 1)])


def test_bootstrap_comes_from_option_group_or_environment(closed_port):
    for arguments, environment in (
        (["topic", "list", "-b", f"127.0.0.1:{closed_port}"], {"MQD_BOOTSTRAP": "127.0.0.1:1"}),
        (["-b", f"127.0.0.1:{closed_port}", "topic", "list"], {"MQD_BOOTSTRAP": "127.0.0.1:1"}),
        (["topic", "list"], {"MQD_BOOTSTRAP": f"127.0.0.1:{closed_port}"}),
    ):
        done = run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (EXIT_UNREACHABLE, "")
        assert f"127.0.0.1:{closed_port} " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["topc"], "did you mean topic?"),
        (["frobnicate"], "mqd --help lists all commands"),
        (["topic", "create"], "NAME"),
        (["topic", "create", "t", "-p", "0"], "0"),
        (["topic", "create", "t", "-c", "retention"], "takes KEY=VALUE"),
        (["topic", "alter", "t"], "nothing to change"),
        (["produce", "t", "-k", ""], "cannot be empty"),
        (["produce", "t", "--idempotent", "--acks", "1"], "needs --acks all"),
        (["consume", "t", "-o", "nowhere"], "not a starting point"),
        (["consume", "t", "-f", "%y"], "%y"),
        (["consume", "t", "--until", "soon"], "not a time"),
        (["topic", "list", "-b", "host:99999"], "not HOST:PORT"),
        (["cat", "-G", "g"], "does not join groups"),
        (["cat", "-C"], "-t TOPIC is missing"),
        (["cat", "-Q", "-t", "x"], "TOPIC:PARTITION:TIMESTAMP"),
        (["log", "dump", "/nonexistent"], "does not exist"),
        (["completion", "tcsh"], "tcsh"),
        (["--frob"], "--frob"),
    ],
)
def test_wrong_usage_is_exit_code_2_in_one_line(arguments, part, capsys):
    assert main_module._run(arguments) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("mqd: ") and error.count("\n") == 1
    assert part in error


def test_a_bug_is_reported_in_one_line_unless_debugging(monkeypatch, capsys):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(cli, "main", lambda **_: broken())
    assert main_module._run([]) == EXIT_FAILED
    assert (
        capsys.readouterr().err == "mqd: RuntimeError: boom (this is a bug in mqd; MQD_DEBUG=1 shows the traceback)\n"
    )
    monkeypatch.setenv("MQD_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main_module._run([])


def test_interrupts_are_quiet(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    assert main_module._run([]) == EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_errors_in_words():
    assert explain(FileNotFoundError(2, "No such file or directory", "x")) == (
        "x: No such file or directory",
        EXIT_FAILED,
    )
    from confluent_kafka import KafkaError, KafkaException

    text, code = explain(KafkaException(KafkaError(KafkaError._TRANSPORT)))
    assert code == EXIT_UNREACHABLE and "is it running?" in text
    text, code = explain(KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS, "Topic 'x' already exists.")))
    assert code == EXIT_FAILED and text == "Topic 'x' already exists; with --if-not-exists that is not an error"
    from mqd.base.property_values import ConfigError

    assert explain(ConfigError("x is unknown"))[1] == EXIT_USAGE


def test_pairs():
    assert pairs(["a=1", " b = c=d"], "-c") == {"a": "1", "b": " c=d"}
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(click.UsageError):
            pairs(bad, "-c")


def test_cli_errors_carry_their_code():
    assert CliError("x", 3).exit_code == 3 and CliError("x").exit_code == EXIT_FAILED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, capsys):
    assert main_module._run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_MQD_COMPLETE={shell}_complete" in script
    if shell == "zsh":
        assert script.startswith("#compdef mqd\n")


def test_completion_completes():
    words = run(_MQD_COMPLETE="bash_complete", COMP_WORDS="mqd topic ad", COMP_CWORD="2").stdout.split()
    assert words == ["plain,add-partitions"]
    words = run(
        _MQD_COMPLETE="bash_complete", COMP_WORDS="mqd config set topic/x retention.m", COMP_CWORD="4"
    ).stdout.split()
    assert words == ["plain,retention.ms="]
    words = run(
        _MQD_COMPLETE="bash_complete", COMP_WORDS="mqd config set group/x share.i", COMP_CWORD="4"
    ).stdout.split()
    assert words == ["plain,share.isolation.level="]


def broken(*_: object, **__: object) -> None:
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("echo", [click.echo, broken])
def test_a_closed_stdout_is_not_an_error(echo, monkeypatch, capfd):
    from mqd.cli.verbs import completion

    monkeypatch.setattr(completion.click, "echo", echo)
    with unread(monkeypatch):
        assert main_module._run(["completion", "bash"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("has_file", [True, False])
def test_another_pipe_that_breaks_is_an_error(has_file, monkeypatch, capfd):
    from mqd.cli.verbs import completion

    monkeypatch.setattr(completion.click, "echo", broken)
    if not has_file:
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main_module._run(["completion", "bash"]) == EXIT_FAILED
    assert capfd.readouterr().err == "mqd: [Errno 32] Broken pipe\n"


def test_a_reader_that_stops_early_is_not_an_error():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m mqd.cli.main completion bash | head -n 1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("data", "run", "python", "refused"),
    [
        ("/100%", "/run", "/python", "/100%: the path of the data directory"),
        ("/data", '/"run"', "/python", '/"run": the path of the run directory'),
        ("/data", "/run", "/new\nline", "/new\nline: the path of the Python interpreter"),
    ],
)
def test_a_path_that_supervisord_cannot_parse_is_named(monkeypatch, data, run, python, refused):
    monkeypatch.setattr("sys.executable", python)
    places = layout("/")._replace(data_dir=Path(data), run_dir=Path(run))
    with pytest.raises(CliError) as error:
        _check_paths(places)
    assert error.value.message.startswith(f"{refused} cannot have a percent sign, a quotation mark or a line break")


def test_a_broker_without_an_id_is_refused_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(brokers={4: None})
    monkeypatch.setattr(librdkafka, "metadata", lambda _admin: found)
    assert config._resource(None, "broker").name == "4"
    found.brokers = {4: None, 2: None}
    with pytest.raises(CliError, match="several brokers; name one: broker/2, broker/4"):
        config._resource(None, "broker")
    assert config._resource(None, "broker/4").name == "4"


def test_a_dry_run_of_acl_remove_needs_a_broker() -> None:
    words = ["acl", "remove", "--all", "--dry-run", "--data-dir", "/nowhere"]
    with pytest.raises(click.UsageError, match="leave out --data-dir"):
        CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize("rate", ["9" * 400, f"1.{'9' * 400}", "9" * 400 + "GiB/s"])
def test_a_rate_of_too_many_digits_is_a_usage_error(rate):
    with pytest.raises(click.BadParameter, match="is not a rate"):
        quota.Rate().convert(rate, None, None)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["quota", "set", "loader", "--connections", "10"], "--connections needs --ip"),
        (["quota", "set", "--ip", "10.0.0.7", "--produce", "5MB"], "--connections needs --ip"),
        (["topic", "alter", "orders", "--partitions", "5"], "mqd topic add-partitions NAME --to 5"),
    ],
)
def test_the_fitting_options_are_named(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module._run([*arguments, "-b", "127.0.0.1:1"]) == 2
    assert hint in capsys.readouterr().err
