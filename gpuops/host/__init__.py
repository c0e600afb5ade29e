"""The only access to the machine: clocks, ``/proc``, ``/sys``, the kernel log, NVML, commands.

Everything that can hang is read in a child process with a deadline (`probe`). Every reader takes
the root of the file system as an argument, so that tests read a recorded machine.
"""
