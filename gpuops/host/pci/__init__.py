"""The PCI bus from ``/sys/bus/pci``: error reporting, adapters' links, switches and what they need.

`aer` is the kernel's error counters and what a device is; `nic_link` the links of network adapters;
`nvswitch` boards with NVSwitches; `paths` what lies between GPUs and adapters. GPUs' own links are
read through NVML (`gpuops.host.nvml`), addresses and drivers by `gpuops.host.sysfs`.
"""
