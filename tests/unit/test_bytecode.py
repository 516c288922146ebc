"""Processes that tests start keep their bytecode, whatever Python's settings for the tree are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import bytecode


@pytest.fixture
def without_bytecode(tmp_path, monkeypatch):
    """`tmp_path / "installed"` contains the only installed packages."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "installed"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)


def test_processes_that_a_test_starts_keep_their_bytecode():
    output = subprocess.check_output([sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"], text=True)
    assert output.strip() == "False" and not sys.dont_write_bytecode


def test_bytecode_goes_elsewhere_and_not_into_the_tree(tmp_path, without_bytecode):
    bytecode.keep_apart(tmp_path / "bytecode")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "module_of_a_broker.py").write_text("answer = 42\n")
    subprocess.check_call([sys.executable, "-c", "import module_of_a_broker"], cwd=tree)
    assert [path.name for path in tree.iterdir()] == ["module_of_a_broker.py"]
    assert list((tmp_path / "bytecode").rglob("module_of_a_broker.*.pyc"))


def test_installed_modules_are_not_compiled_again(tmp_path, without_bytecode):
    installed = tmp_path / "installed"
    (installed / "package").mkdir(parents=True)
    (installed / "package" / "a_module.py").write_text("answer = 42\n")
    subprocess.check_call([sys.executable, "-m", "compileall", "-q", installed], env={})
    bytecode.keep_apart(tmp_path / "bytecode")
    code = "import os, package.a_module as it; print(os.path.islink(it.__cached__), it.__cached__)"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=installed, text=True)
    assert output.split() == ["True", str(next((tmp_path / "bytecode").rglob("a_module.*.pyc")))]
