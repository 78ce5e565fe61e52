import multiprocessing

import pytest


@pytest.fixture(scope="session")
def processes():
    """Starts ranks as processes from a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loop.kill_ranks"])
    return context
