"""Checks of GPUs: driver, errors, clocks, power, memory. Facts come from NVML and sysfs."""
