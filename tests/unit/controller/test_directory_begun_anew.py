"""A log directory whose meta.properties was written by hand to replace a lost one is reported as
such; one that is merely empty is not.
"""

from pathlib import Path

import pytest

from mqd.controller import directories


@pytest.mark.parametrize(
    ("text", "folders", "used", "fresh"),
    [
        ("directory.id=d\n", [], {"d"}, True),
        ("directory.id=d\n", ["orders-0"], {"d"}, False),
        ("directory.id=d\n", ["lost+found", "orders-x"], {"d"}, True),
        ("directory.id=d\n", [], set(), False),
        ("version=1\ncluster.id=c\nnode.id=1\ndirectory.id=d\n", [], {"d"}, False),
    ],
)
def test_the_state_of_each_directory(
    tmp_path: Path, text: str, folders: list[str], used: set[str], fresh: bool
) -> None:
    (tmp_path / directories.META_PROPERTIES).write_text(text)
    for name in folders:
        (tmp_path / name).mkdir()
    (found,) = directories.identify([str(tmp_path)], "c", 1, {"d": str(tmp_path)}, used, lambda: "new")
    assert (found.directory_id, found.usable, found.fresh) == ("d", True, fresh)
