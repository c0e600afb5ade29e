"""`gpuops profile capture`: a good node becomes a profile that passes, and what is lost fails."""

import json
import tomllib

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import addresses, shape

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk]

HEALTHY = shape("h100", driver="550.163.01")
MOUNTS = (
    "25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
    "26 25 259:1 / /scratch rw,relatime - xfs /dev/nvme0n1p1 rw",
    "27 25 0:50 / /home rw,relatime - nfs4 store:/home rw",
    "28 25 0:51 / /auto rw - autofs systemd-1 rw",
    "29 28 0:52 / /auto/ann rw - nfs4 store:/ann rw",
    "30 25 0:53 / /home/ann/fuse rw - fuse.sshfs ann@x: rw,user_id=1000",
    "31 25 7:1 / /snap/core ro - squashfs /dev/loop1 ro",
)


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


class Node:
    """A node made of files, with eight GPUs and two InfiniBand ports."""

    def __init__(self, tmp_path, mock):
        self.root = FakeRoot(tmp_path / "n1").mounts(*MOUNTS)
        for address in addresses(8):
            self.root.gpu(address)
        for point in ("scratch", "home", "auto/ann", "home/ann/fuse", "snap/core"):
            (self.root.path / point).mkdir(parents=True, exist_ok=True)
        for index in range(2):
            self.port(index)
        self.root.write("proc/swaps", "Filename Type Size Used Priority\n")
        self.root.write("proc/sys/kernel/osrelease", "6.1.0-test\n")
        self.env = {
            "GPUOPS_ROOT": str(self.root.path),
            "GPUOPS_SPOOL": str(tmp_path / "spool"),
            "GPUOPS_STATE": str(tmp_path / "state"),
            "SLURMD_NODENAME": "n1",
            **mock.env(HEALTHY),
        }

    def port(self, index, state="4: ACTIVE", phys="5: LinkUp"):
        device = f"sys/class/infiniband/mlx5_{index}"
        self.root.write(f"{device}/node_guid", f"0000:0000:0000:000{index}\n")
        self.root.write(f"{device}/fw_ver", "28.39.1002\n")
        for name, text in {
            "state": state,
            "phys_state": phys,
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
        }.items():
            self.root.write(f"{device}/ports/1/{name}", f"{text}\n")

    def __call__(self, *args):
        return gpuops(*args, env=self.env)

    def failed(self, path):
        run = self("check", "--profile", str(path), "--json", "--no-record")
        return {
            item["check"] for item in json.loads(run.stdout)["findings"] if item["status"] == "fail"
        }


@pytest.fixture
def node(tmp_path, mock):
    return Node(tmp_path, mock)


def test_a_good_node_becomes_a_profile_that_it_passes_and_that_misses_what_is_lost(node, tmp_path):
    path = tmp_path / "rack7.toml"
    made = node("profile", "capture", "--out", str(path))
    assert made.returncode == 0, made.stderr

    table = tomllib.loads(path.read_text())
    values = {
        key: item["value"]
        for key, item in table.items()
        if isinstance(item, dict) and "value" in item
    }
    sources = {
        item["source"] for item in table.values() if isinstance(item, dict) and "source" in item
    }
    assert table["inherits"] == "h100-sxm"
    assert table["match"] == {"gpu": "NVIDIA H100 80GB HBM3", "gpu_count": 8}
    expected = {
        "gpu_count": 8,
        "nvlink_count": 18,
        "pcie_width": 16,
        "driver": ["550.163.01"],
        "nic_count": 2,
        "nic_rate_gbs": 50.0,
        "mounts": ["/home", "/scratch"],
        "memory_bytes_min": int(1000000 * 1024 * 0.985),
        "swap": False,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert all(text.startswith("captured on n1, 20") for text in sources)
    assert "# kernel 6.1.0-test" in path.read_text()

    assert node.failed(path) == set()

    node.port(1, state="1: DOWN", phys="2: Polling")
    node.root.mounts(*(line for line in MOUNTS if "/scratch" not in line))
    mock_nvml.change(node.env, shape("h100", 7))
    assert {"gpu_count", "ib_ports", "mount_state"} <= node.failed(path)


def test_a_file_is_replaced_only_on_request(node, tmp_path):
    path = tmp_path / "rack7.toml"
    path.write_text("mine")

    refused = node("profile", "capture", "--out", str(path))

    assert (refused.returncode, path.read_text()) == (64, "mine")
    assert "exists; use --force" in refused.stderr


def test_a_misspelt_check_cannot_be_accepted(node):
    run = node("profile", "capture", "--accept", "ib_port")

    assert (run.returncode, run.stdout) == (64, "")
    assert "ib_port" in run.stderr


def test_a_second_profile_for_the_same_nodes_is_refused(node, tmp_path):
    """Two that match would switch each other off, and the shipped one, too."""
    (tmp_path / "site/profiles").mkdir(parents=True)
    node.env["GPUOPS_SITE_DIR"] = str(tmp_path / "site")
    first = node("profile", "capture", "--name", "h100-rack")
    again = node("profile", "capture", "--name", "h100-rack", "--force")
    second = node("profile", "capture", "--name", "h100-row")
    elsewhere = node("profile", "capture", "--out", str(tmp_path / "h100-row.toml"))

    assert (first.returncode, again.returncode, second.returncode) == (0, 0, 64), first.stderr
    assert "'h100-rack'" in second.stderr
    assert "all match this node" in second.stderr
    assert (elsewhere.returncode, "all match this node" in elsewhere.stderr) == (0, True)
    assert [path.name for path in (tmp_path / "site/profiles").iterdir()] == ["h100-rack.toml"]


def test_a_node_that_is_not_good_is_not_captured(node, tmp_path):
    path = tmp_path / "rack7.toml"
    node.port(1, state="1: DOWN", phys="2: Polling")

    warned = node("profile", "capture", "--out", str(path))
    accepted = node("profile", "capture", "--accept", "ib_ports")
    mock_nvml.change(node.env, shape("h100", broken={2: 15}))
    failed = node("profile", "capture", "--out", str(path))

    assert (warned.returncode, failed.returncode, path.exists()) == (1, 1, False)
    assert "warn ib_ports: mlx5_1/1" in warned.stderr
    assert "fail gpu_lost" in failed.stderr
    assert tomllib.loads(accepted.stdout)["nic_count"]["value"] == 1
