"""Log lines: fields, formats, levels, limits; and the run directory."""

import io
import json
import logging as stdlib

import pytest

from mqd.base import logging, paths


@pytest.fixture
def lines():
    stream = io.StringIO()
    root = stdlib.getLogger()
    before = root.handlers[:], root.level
    logging._state.limit = logging.RateLimit(clock=lambda: 0.0)
    logging.follow(None)
    yield stream
    root.handlers[:], _ = before
    root.setLevel(before[1])
    logging.follow(None)


def test_a_line_for_people(lines):
    log = logging.setup("worker", 3, {}, lines)
    log.warning("request refused", connection=17, client="two words", ratio=0.5)
    text = lines.getvalue()
    assert ' WARNING worker-3 request refused  connection=17 client="two words" ratio=0.5\n' in text


def test_a_line_for_machines(lines):
    log = logging.setup("acceptor", 0, {"logging.format": "json"}, lines).bind(partition="t-0")
    log.error("append failed", errno=28, message="taken")
    line = json.loads(lines.getvalue())
    assert line["message"] == "append failed" and line["partition"] == "t-0" and line["errno"] == 28
    assert line["message_"] == "taken" and line["level"] == "error" and line["process"] == "acceptor"


@pytest.mark.parametrize("form", ["human", "json"])
def test_text_of_a_peer_cannot_forge_a_line(lines, form):
    log = logging.setup("acceptor", 0, {"logging.format": form}, lines)
    log.warning("request refused", client="x\n2026-01-01 ERROR keeper all is lost\x1b[2J")
    assert lines.getvalue().count("\n") == 1 and "\x1b" not in lines.getvalue()


def test_debug_is_off_until_the_level_is_changed(lines):
    word = [6]
    log = logging.setup("worker", 0, {}, lines)
    logging.follow(lambda: word[0])
    log.debug("one")
    word[0] = 7
    log.debug("two")
    word[0] = 3
    log.info("three")
    log.error("four")
    assert [line.split("worker-0 ")[1] for line in lines.getvalue().splitlines()] == ["two", "four"]


def test_a_repeated_message_is_limited_and_counted(lines):
    now = [0.0]
    logging._state.limit = logging.RateLimit(clock=lambda: now[0], burst=3, rate_per_s=1.0)
    log = logging.setup("worker", 0, {}, lines)
    for number in range(10):
        log.warning("again", number=number)
    log.warning("another message is not affected")
    now[0] = 1.0
    log.warning("again", number=10)
    message = [line.split("worker-0 ")[1] for line in lines.getvalue().splitlines()]
    assert message == [
        "again  number=0",
        "again  number=1",
        "again  number=2",
        "another message is not affected",
        "again  number=10 suppressed=7",
    ]


def test_the_limit_forgets_what_was_longest_unused():
    limit = logging.RateLimit(clock=lambda: 0.0, burst=1, rate_per_s=0.0)
    for key in range(logging.MESSAGE_COUNT_MAX + 1):
        assert limit.admit(key) == 0
    assert limit.admit(1) == -1
    assert limit.admit(0) == 0


def test_two_threads_may_forget_the_same_message():
    """The log call of the slower one raised KeyError."""

    class Raced(dict):
        def __iter__(self):
            keys = list(self.keys())
            self.pop(keys[0], None)  # by another thread, before this one removes it
            return iter(keys)

    limit = logging.RateLimit(clock=lambda: 0.0, burst=1, rate_per_s=0.0)
    limit._buckets = Raced()
    for key in range(logging.MESSAGE_COUNT_MAX + 1):
        assert limit.admit(key) == 0
    assert limit.admit(1) == -1
    assert limit.admit(0) == 0


def test_an_exception_carries_its_traceback(lines):
    log = logging.setup("controller", 0, {"logging.format": "json"}, lines)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    assert "ValueError: why" in json.loads(lines.getvalue())["exception"]


@pytest.mark.parametrize(
    ("number", "name"), [(0, "error"), (3, "error"), (4, "warning"), (5, "info"), (6, "info"), (7, "debug")]
)
def test_syslog_numbers(number, name):
    assert logging.level_name(number) == name


def test_the_run_directory_is_beside_the_data_when_its_name_is_short(tmp_path):
    assert paths.run_dir("/data") == paths.Path("/data/run")


def test_the_run_directory_of_a_long_path_is_short_and_always_the_same(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    assert paths.run_dir(deep) == paths.run_dir(str(deep))
    assert len(str(paths.layout(deep).controller_socket)) <= paths.SOCKET_PATH_BYTES_MAX
    assert paths.run_dir(deep) != paths.run_dir(deep.parent / "other")


def test_another_users_run_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "run_dir", lambda data_dir: tmp_path / "stolen")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stolen").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a directory that only this user can write"):
        paths.create(paths.layout(tmp_path / "data"))
