"""Checkpoints that several tests share, each saved once a session, and the workers of a test's plans."""

import pytest

from tests.numerics.checkpoints import save
from xrunner.cluster.workers import Workers


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Name as in CHECKPOINTS -> (directory, the transformers model that was saved there)."""
    directories = {}

    def make(name):
        if name not in directories:
            directories[name] = save(tmp_path_factory.mktemp(name), *name.split("-", 1))
        return directories[name]

    return make


@pytest.fixture(scope="session")
def small_opt(checkpoint):
    return checkpoint("opt-tied")


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as started:
        yield started
