"""A machine made of files, for everything that reads below ``GPUOPS_ROOT``."""

import json
from pathlib import Path

HEALTHY_MEMINFO = "MemTotal:  1000000 kB\nMemFree:  1000 kB\nMemAvailable:  900000 kB\n"


class FakeRoot:
    """A healthy two-CPU machine without GPUs; each method makes one thing different."""

    def __init__(self, path):
        self.path = Path(path)
        self.write("proc/meminfo", HEALTHY_MEMINFO)
        self.write("proc/loadavg", "0.10 0.20 0.30 1/200 4242\n")
        self.write("proc/stat", "cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\nbtime 1700000000\n")
        self.write("proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n")
        self.write("etc/fstab", "")
        self.mounts("25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw")
        self.kmsg("Linux version 6.1.0")
        self.clock(synchronised=True)

    def write(self, name, text):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self

    def memory(self, *, total_kib, available_kib):
        return self.write(
            "proc/meminfo", f"MemTotal: {total_kib} kB\nMemAvailable: {available_kib} kB\n"
        )

    def mounts(self, *lines):
        return self.write("proc/self/mountinfo", "".join(f"{line}\n" for line in lines))

    def kmsg(self, *texts):
        records = [f"4,{n},{n * 1_000_000},-;{text}\n" for n, text in enumerate(texts)]
        return self.write("dev/kmsg", "".join(records))

    def clock(self, *, synchronised, error_max_s=0.01):
        state = {"synchronised": synchronised, "offset_s": 0.0, "error_max_s": error_max_s}
        return self.write("syscall/adjtimex.json", json.dumps(state))

    def process(self, pid, name, state, start_ticks=7):
        tail = " ".join(["0"] * 18)
        return self.write(f"proc/{pid}/stat", f"{pid} ({name}) {state} {tail} {start_ticks} 0\n")

    def gpu(self, address, *, answers=True, driver="nvidia"):
        device = f"sys/bus/pci/devices/{address}"
        self.write(f"{device}/vendor", "0x10de\n")
        self.write(f"{device}/class", "0x030200\n")
        self.write(f"{device}/config", b"\xde\x10\x30\x23" if answers else b"\xff" * 4)
        if driver:
            link = self.path / device / "driver"
            link.symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return self

    def gpu_off(self, address):
        return self.write(f"sys/bus/pci/devices/{address}/config", b"\xff" * 64)
