"""The exceptions of gpuops and the exit code each one ends a command with.

* GpuopsError               70  our own failure, said in one line
  x UsageError              64  what the user typed or wrote is wrong
    + ConfigError           64  a configuration, suite, profile or rule file
  x StoreError              75  the store cannot serve now
    + StoreUnreachableError 75  no server, refused, wrong password, locked for too long
    + SchemaMismatchError   75  the store's schema is newer or older than this code
    + NetworkFilesystemError 64 SQLite was asked for on a network file system
  x SpoolError              75  the spool directory cannot take or give lines
  x SlurmError              75  Slurm's controller does not answer, or refuses
  x BusyError               75  another test of this node runs
  x ProbeError              70  the machine could not be read (checks turn it into `unknown`)
  x MissingDataError        70  a shipped folder (checks, runbooks, slurm) is not there
  x UnsupportedTorchError   64  this torch lacks a name that `gpuops run` leans on
  x DrillError               1  a fault that cannot be injected here

A message says what was tried, on what, what came back, and what to do. Bad hardware is a
finding, never an exception.
"""

EXIT_OK = 0
EXIT_FAIL = 1
EXIT_UNKNOWN = 3
EXIT_USAGE = 64
EXIT_INTERNAL = 70
EXIT_TRY_LATER = 75
EXIT_REQUEUE = 85
EXIT_NODE_UNHEALTHY = 86
EXIT_DO_NOT_REQUEUE = 93


class GpuopsError(Exception):
    """Base of every error that gpuops raises on purpose."""

    exit_code = EXIT_INTERNAL


class UsageError(GpuopsError):
    """The user asked for something that cannot be."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration, suite, profile or rule file is malformed or says something unknown."""


class StoreError(GpuopsError):
    """The incident store cannot serve this request now."""

    exit_code = EXIT_TRY_LATER


class StoreUnreachableError(StoreError):
    """No connection: unknown host, refused, wrong password, or locked past the deadline."""


class SchemaMismatchError(StoreError):
    """The store's schema and this code are of different releases."""


class NetworkFilesystemError(StoreError):
    """SQLite on a network file system, where its locks cannot be trusted."""

    exit_code = EXIT_USAGE


class SpoolError(GpuopsError):
    """The spool directory cannot be written or read."""

    exit_code = EXIT_TRY_LATER


class SlurmError(GpuopsError):
    """A command of Slurm is missing, failed, or got no answer from slurmctld."""

    exit_code = EXIT_TRY_LATER


class BusyError(GpuopsError):
    """Another process tests this node, and two at a time would measure each other."""

    exit_code = EXIT_TRY_LATER


class ProbeError(GpuopsError):
    """The machine could not be read.

    *reason* is a value of ``model.UnknownReason``, so that a check can answer `unknown` with it.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class MissingDataError(GpuopsError):
    """A folder that ships with gpuops is not where the wheel or the checkout has it."""


class UnsupportedTorchError(UsageError):
    """The installed torch is absent, too old, or lacks a private name that we lean on."""


class DrillError(GpuopsError):
    """This fault cannot be injected here, or not into this; nothing was broken."""

    exit_code = EXIT_FAIL
