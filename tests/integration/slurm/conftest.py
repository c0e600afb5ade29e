"""One Slurm for all tests of this folder; each test meets it healthy and without a past."""

import pytest
from support import mock_nvml
from support.slurm import running_cluster


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory):
    with running_cluster(mock_nvml.build(tmp_path_factory.mktemp("nvml"))) as running:
        yield running


@pytest.fixture
def cluster(slurm_daemons, tmp_path):
    slurm_daemons.reset(f"sqlite:///{tmp_path}/store.db")
    return slurm_daemons
