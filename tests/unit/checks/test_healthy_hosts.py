"""No check of the host fails a healthy node, whatever healthy nodes look like."""

import random
from pathlib import Path

import pytest
from support.checks import NODE

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import (
    FlagExpectation,
    NumberExpectation,
    NumbersExpectation,
    Profile,
    TextExpectation,
)
from gpuops.checks.core.suite import load_suite
from gpuops.host.bmc import BmcEvent, BmcLog, PowerSupplies, PowerSupply
from gpuops.host.dcgm import DcgmDiagnostic, DcgmError, DcgmResult
from gpuops.host.infiniband import PkeyTable, PkeyTables, Port, RdmaPorts
from gpuops.host.kernel_state import Cpu, Modules, ShmemHugePages, Swap, SwapArea, Taint
from gpuops.host.leftovers import Leftovers, UserProcess
from gpuops.host.memory_modules import Dimm, Dimms, Edac, MemoryController
from gpuops.host.munge import MungeTrip
from gpuops.host.net.interfaces import Bond, BondSlave, Interface, Interfaces
from gpuops.host.node_state import Counters, CounterSample
from gpuops.host.pci.aer import AerBus, AerDevice
from gpuops.host.pci.nic_link import NicPcieLink, NicPcieLinks, PcieCapability
from gpuops.host.pci.nvswitch import NvSwitchBoard
from gpuops.host.procfs import Memory
from gpuops.host.storage.mounts import MountTable
from gpuops.host.storage.nvme import Array, MdRaid, Nvme, NvmeDrive
from gpuops.host.storage.write_test import WriteAnswer, Writes
from gpuops.host.systemd import RuntimeAnswer, Unit, Units
from gpuops.host.users import UserLookup, Users

SUITE = load_suite("full", [Path(__file__).parents[3] / "checks" / "suites"])
NODES = 3000
MODULES = ("nvidia", "nvidia_peermem", "mlx5_ib")
SERVICES = ("munge", "slurmd", "nvidia-fabricmanager")


def number(value):
    return NumberExpectation(value=value, source="drawn")


def words(*value):
    return TextExpectation(value=value, source="drawn")


def fabric(draw, count):
    expected = [
        Port(
            device=f"mlx5_{n}",
            number=1,
            guid=f"g{n}",
            state="ACTIVE",
            phys_state="LinkUp",
            rate_gbs=50.0,
            link_layer=draw.choice(["InfiniBand", "Ethernet"]),
            firmware="28.39.1002",
            counters={
                "symbol_error": draw.randrange(2**16),
                "link_downed": draw.randrange(255),
                "out_of_sequence": draw.randrange(10**6),
                "carrier_downs": draw.randrange(20),
            },
        )
        for n in range(count)
    ]
    unused = [
        Port(
            device=f"mlx5_{n}",
            number=1,
            guid=f"g{n}",
            state="DOWN",
            phys_state=draw.choice(["Polling", "Disabled"]),
            rate_gbs=2.5,
            firmware="28.39.1002",
        )
        for n in range(count, count + draw.randrange(3))
    ]
    return RdmaPorts((*expected, *unused))


def pkeys(draw, count):
    """Return the ports of *count* adapters in our partition, and others in another or down."""
    ours = [
        PkeyTable(
            device=f"mlx5_{n}",
            number=1,
            guid=f"g{n}",
            is_active=True,
            keys=draw.choice([(0x7FFF, 0x8001), (0x8001,), (0x0001, 0x8001)]),
        )
        for n in range(count)
    ]
    others = [
        PkeyTable(
            device=f"mlx5_{n}",
            number=1,
            guid=f"g{n}",
            is_active=draw.random() < 0.5,
            keys=draw.choice([(0x7FFF,), (0xFFFF,), ()]),
            is_complete=draw.random() < 0.5,
        )
        for n in range(count, count + draw.randrange(3))
    ]
    return PkeyTables((*ours, *others))


def pcie_links(draw, count):
    """Return as many adapters at Gen5 x16, and others: onboard, or in a slower slot."""
    full, less = PcieCapability(generation=5, width=16), PcieCapability(generation=3, width=8)
    unknown = PcieCapability()
    links = [
        NicPcieLink(
            address=f"0000:{n:02x}:00.0",
            names=(f"mlx5_{n}",),
            guid=f"g{n}",
            now=full,
            adapter=full,
            port=draw.choice([full, unknown]),
        )
        for n in range(count)
    ]
    for n in range(count, count + draw.randrange(4)):
        most = draw.choice([full, less, unknown])
        links.append(
            NicPcieLink(
                address=f"0000:{n:02x}:00.0",
                names=(f"eno{n}",),
                guid=draw.choice([None, f"g{n}"]) if count else None,
                now=draw.choice([less, unknown]),
                adapter=most,
                port=draw.choice([less, unknown]),
            )
        )
    return NicPcieLinks(tuple(links))


def interfaces(draw):
    """Return a bond (or none) with ens0, what the profile expects, and what nobody uses."""
    mode = draw.choice(["802.3ad", "active-backup", "balance-alb"])
    is_bond, names = draw.random() < 0.5, ("ens0", "ens1")
    used = [
        Interface(
            name=name,
            address=f"b8:3f:d2:00:00:{n:02x}",
            is_physical=True,
            is_switched_on=draw.choice([True, None]),
            carrier=True,
            operstate=draw.choice(["up", "unknown", "dormant", None]),
            rate_gbs=draw.choice([3.125, None]) if n == 0 or mode == "802.3ad" else 0.125,
            carrier_downs=draw.randrange(50),
            slave=BondSlave(
                mii_status=draw.choice(["up", "up", "going back", None]),
                actor_state=draw.choice([0x3D, 0x3F, None]) if mode == "802.3ad" else None,
            )
            if is_bond
            else None,
        )
        for n, name in enumerate(names)
    ]
    unused = [
        Interface(
            name=name,
            is_physical=name.startswith("eno"),
            is_switched_on=draw.choice([True, False]),
            carrier=draw.choice([False, None]),
            operstate="down",
        )
        for name in draw.sample(["eno1", "eno2", "docker0", "virbr0", "bond7"], 3)
    ]
    bonds = [Bond(name="bond7", mode="balance-rr")]
    if is_bond:
        partner = draw.choice([True, None]) if mode == "802.3ad" else None
        bonds.append(Bond(name="bond0", mode=mode, slaves=names, has_partner=partner))
    return Interfaces((*used, *unused), tuple(bonds))


def aer(draw):
    return AerBus(
        tuple(
            AerDevice(
                address=f"0000:{n:02x}:00.0",
                what=draw.choice(["GPU", "NIC", "port"]),
                totals={"correctable": draw.randrange(10**6), "nonfatal": 0, "fatal": 0},
            )
            for n in range(draw.randrange(40))
        ),
        40,
    )


def drives(draw, count):
    tool = draw.random() < 0.7
    return Nvme(
        tuple(
            NvmeDrive(
                name=f"nvme{n}",
                serial=f"S{n}",
                state=draw.choice(["live", "live", None]),
                transport="pcie",
                critical_warning=0 if tool else None,
                media_errors=draw.randrange(1000) if tool else None,
                used_percent=draw.randrange(100) if tool else None,
            )
            for n in range(count)
        ),
        tool=tool,
    )


def taint(draw):
    healthy = [0, 1, 6, 9, 11, 12, 13, 15, 16, 17]
    return Taint(sum(1 << bit for bit in healthy if draw.random() < 0.3))


def dcgm(draw):
    if draw.random() < 0.5:
        return DcgmDiagnostic(installed=False)
    off = DcgmError(text="Persistence mode is disabled.", code=29, category=8, severity=5)
    persistence = (off,) if draw.random() < 0.3 else ()
    results = [
        DcgmResult(
            category="Deployment",
            test="software",
            entity=f"GPU {gpu}",
            status="fail" if persistence else "pass",
            errors=persistence,
        )
        for gpu in range(8)
    ]
    results.append(
        DcgmResult(
            category="Hardware",
            test="memory",
            entity="GPU 0",
            status=draw.choice(["pass", "skip"]),
        )
    )
    code = 226 if persistence else 0
    return DcgmDiagnostic(installed=True, exit_code=code, results=tuple(results))


def bmc_events(draw):
    """Return what fills the logs of healthy nodes: corrected errors, and faults that ended."""
    kinds = [
        ("Memory #0x02", "Correctable ECC"),
        ("Power Supply #0x51", "Presence detected"),
        ("Power Unit #0x01", "Fully Redundant"),
        ("Temperature #0x04", "Upper Non-critical going high"),
        ("Memory #0x02", "Uncorrectable ECC"),
    ]
    events = []
    for _ in range(draw.randrange(9)):
        sensor, text = draw.choice(kinds)
        # Uncorrectable ones are of an earlier boot, or of a time without a clock.
        age_s = draw.uniform(86400, 1e7) if "Unc" in text else draw.uniform(0, 1e6)
        age = draw.choice([age_s, None])
        events.append(BmcEvent(sensor=sensor, text=text, asserted=True, age_s=age))
    return tuple(events)


def host(draw):
    """Return the facts of one healthy host by their look, and its profile."""
    nics, disks, cpus = draw.choice([0, 4, 8, 10]), draw.randrange(9), draw.choice([64, 224])
    modules, memory_bytes = draw.choice([24, 32]), draw.randrange(10**12, 2 * 10**12)
    facts = {
        "infiniband": fabric(draw, nics),
        "ib_pkeys": pkeys(draw, nics),
        "nic_pcie": pcie_links(draw, nics),
        "interfaces": interfaces(draw),
        "aer": aer(draw),
        "edac": Edac(
            tuple(
                MemoryController(name=f"mc{n}", corrected=draw.randrange(10**5), uncorrected=0)
                for n in range(draw.randrange(9))
            )
        ),
        "memory": Memory(memory_bytes, memory_bytes // 2),
        "dimms": Dimms((*[Dimm("A", 64 * 2**30)] * modules, Dimm("B", 0))),
        "cpu": Cpu(
            online=cpus,
            present=cpus * 2,
            governors={draw.choice(["performance", "powersave", "schedutil"]): cpus},
            clock_source=draw.choice(["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "hpet"]),
        ),
        "swap": Swap((SwapArea("/swap", 10**9, draw.randrange(10**9)),) * draw.randrange(2)),
        "shmem_huge_pages": ShmemHugePages(draw.choice([None, "never", "advise"])),
        "mount_table": MountTable(("/", "/home", "/scratch"), in_fstab=("/", "/old")),
        "writing": Writes((WriteAnswer(path="/scratch", elapsed_s=draw.random()),)),
        "nvme": drives(draw, disks),
        "mdraid": MdRaid(
            (
                Array(name="md0", state="active", level="raid0"),
                Array(name="md1", state="active", level="raid1", wanted=2, working=2),
            )
        ),
        "leftovers": Leftovers(
            zombies=draw.randrange(200),
            count=1,
            processes=(UserProcess(50, "bash", 1000, draw.random() * 1e6),),
        ),
        "kernel_modules": Modules(present=MODULES),
        "taint": taint(draw),
        "services": Units(
            systemd=True,
            units=tuple(
                Unit(name=name, load="loaded", active=draw.choice(["active", "activating"]))
                for name in SERVICES
            ),
        ),
        "munge": MungeTrip(
            installed=True,
            elapsed_s=draw.random(),
            error=draw.choice([None, "munge exited with code 6"]),
        ),
        "users": Users(
            (
                UserLookup(
                    asked="20001", of_job=True, elapsed_s=5.0, uid=draw.choice([None, 20001])
                ),
                UserLookup(asked="canary", elapsed_s=draw.uniform(0, 5), uid=5000),
            )
        ),
        "container_runtime": RuntimeAnswer(),
        "bmc_log": BmcLog(events=bmc_events(draw)),
        "power_supplies": PowerSupplies(
            sensors=tuple(
                PowerSupply(name=f"PS{n}", states=(draw.choice(["presence detected", ""]),))
                for n in range(4)
            )
        ),
        "nvswitch_board": NvSwitchBoard(
            switches=draw.choice([0, 6]),
            models=(draw.choice([0x1AF1, 0x22A3]),),
            fabric_manager=draw.choice([True, True, None]),
            adapters=nics,
            peermem=draw.random() < 0.5,
        ),
        "dcgm": dcgm(draw),
    }
    profile = Profile(
        name="drawn",
        nic_count=number(nics),
        nic_rate_gbs=NumbersExpectation(value=(50.0,), source="drawn"),
        nic_firmware=words("28.39.1002", "28.40.1000"),
        ib_pkeys=words("0x8001"),
        nic_pcie_width=number(16),
        nic_pcie_generation=number(5),
        interfaces=words("ens0"),
        memory_bytes_min=number(10**12),
        dimm_count=number(modules),
        dimm_bytes=number(64 * 2**30),
        cpu_count=number(cpus),
        cpu_governor=words("performance"),
        clock_source=words("tsc"),
        swap=FlagExpectation(value=False, source="drawn"),
        nvme_count=number(disks),
        services=words(*SERVICES),
        mounts=words("/home", "/scratch/"),
        kernel_modules=words(*MODULES),
        users=words("canary"),
    )
    return facts, profile


def earlier(draw, planned, facts):
    """Return an earlier sample: a little lower, or of before a reset."""
    values = {}
    for item in planned:
        for name, value in item.check.counters(facts[item.check.probe.name]).items():
            values[name] = value + draw.choice([0, 0, 0, -1, 50])
    sample = CounterSample(boot_id="b", since_boot_s=0.0, t_us=0, values=values)
    return Counters(
        boot_id="b",
        since_boot_s=draw.uniform(10, 86400),
        t_us=round(draw.uniform(10, 86400) * 1e6),
        samples=(sample,),
    )


def planned_for(facts):
    return [
        item
        for item in SUITE.planned
        if item.check.probe.name in facts and item.check.name != "memory"
    ]


def verdicts(draw, change=None):
    facts, profile = host(draw)
    planned = planned_for(facts)
    counters = earlier(draw, planned, facts)
    facts |= change or {}
    case = JudgeContext(
        node=NODE,
        profile=profile if draw.random() < 0.7 else Profile(name="none"),
        counters=counters if draw.random() < 0.8 else Counters(),
    )
    for item in planned:
        yield from item.check.judge(facts[item.check.probe.name], item.parameters, case)


def test_thousands_of_healthy_hosts_fail_nothing():
    draw, told = random.Random(20261120), 0
    for _ in range(NODES):
        for finding in verdicts(draw):
            assert finding.status.word != "fail", finding
            told += 1

    assert told > NODES * 20


def test_all_checks_of_the_host_are_among_them():
    facts, _ = host(random.Random(1))

    assert len(planned_for(facts)) == 30


@pytest.mark.parametrize(
    "change",
    [
        {"edac": Edac((MemoryController(name="mc0", corrected=0, uncorrected=1),))},
        {"mdraid": MdRaid((Array(name="md0", state="broken"),))},
        {
            "nvme": Nvme(
                (NvmeDrive(name="nvme0", serial="S0", state="live", critical_warning=1),), tool=True
            )
        },
    ],
    ids=["uncorrected memory error", "broken array", "critical warning"],
)
def test_one_fact_of_a_sick_host_fails_among_all_the_healthy_ones(change):
    assert "fail" in {finding.status.word for finding in verdicts(random.Random(7), change)}
