import json

from mqd.acceptor import audit
from mqd.acceptor.audit import WINDOW_S, Audit
from mqd.security.acl import Operation, ResourceType


def test_a_flood_of_names_is_counted_not_written(tmp_path, monkeypatch):
    """One request can name 300,000 topics."""
    monkeypatch.setattr(audit, "DENIALS_MAX", 5)
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])

    def deny(name: str) -> None:
        found.denied("User:eve", "10.0.0.1", Operation.DESCRIBE, ResourceType.TOPIC, name, False)

    for number in range(1000):
        deny(f"t{number}")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["resource"] for line in lines] == [f"t{number}" for number in range(5)]
    now[0] += WINDOW_S
    deny("later")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("further") or line["resource"] for line in lines[5:]] == [995, "later"]


def test_the_same_denial_is_written_once_in_a_window_with_the_number_of_those_between(tmp_path):
    now, file = [1000.0], tmp_path / "audit.log"
    found = Audit(file, lambda: now[0])
    for _ in range(4):
        found.denied("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "t", False)
    now[0] += WINDOW_S
    found.denied("User:eve", "10.0.0.1", Operation.READ, ResourceType.TOPIC, "t", False)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert "before" not in first and second["before"] == 3
