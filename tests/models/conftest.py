import pytest

from megarlhf.config.layout import Layout
from tests import tiny


@pytest.fixture(scope="session")
def alone(single_rank):
    """Process groups of one rank."""
    from megarlhf.parallel.groups import build_groups

    return build_groups(Layout(), 1)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """An untied tiny language model with plain rope."""
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    """A tied tiny language model with llama3 rope."""
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "tied", tied=True, llama3=True)


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """A tiny reward model."""
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "judge", num_labels=1)
