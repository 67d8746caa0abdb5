"""A model and a key of the tests' own: the user's are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.io.identity import load_key
from support.commands import write_tiny_bundle


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("models") / "made")


@pytest.fixture(autouse=True)
def no_defaults_of_the_user(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return an empty folder for the configuration; the user's options would change results."""
    folder = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path_factory.getbasetemp() / "key-of-the-tests"
    load_key(key)  # made once, so that no command has to tell of it
    monkeypatch.setenv("SCANLOOM_KEY", str(key))
    return key
