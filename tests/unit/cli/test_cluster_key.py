import stat

from click.testing import CliRunner

from mqd.base import cluster_config
from mqd.cli.main import cli


def key(*words: str):
    return CliRunner().invoke(cli, ["cluster", "key", *words], standalone_mode=False)


def test_a_key_is_created_and_rotated_step_by_step(tmp_path):
    file = tmp_path / "cluster.key"
    assert "copy it to every host" in key(str(file)).output and stat.S_IMODE(file.stat().st_mode) == 0o600
    config = {"cluster.key.file": str(file)}
    first = cluster_config.load_keys(config)
    assert "step by step with `mqd cluster key rotate`" in str(key(str(file)).exception)
    assert "exists already" in str(key("make", str(file)).exception)
    for step, words in (
        (1, "run this again for step 2"),
        (2, "run this again for step 3"),
        (3, "the rotation is done"),
    ):
        output = key("rotate", str(file)).output
        assert f"step {step} of 3: " in output and words in output and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(cluster_config.load_keys(config)) == 1 and cluster_config.load_keys(config) != first
    file.write_text("a\nb\n")
    assert "cannot be changed" in str(key("rotate", str(file)).exception)
