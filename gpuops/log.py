"""Our own log lines: standard error, one line each, without control characters."""

import logging
import sys

# C0, DEL, C1; halves of a surrogate pair, which cannot be encoded; and the marks that turn the
# reading direction, with which a log line can make the rest of a report read backwards (Unicode
# Bidirectional Algorithm, UAX #9 §2).
_BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_HALVES = range(0xD800, 0xE000)
_CODES = [*range(32), *range(127, 160), *_HALVES, *_BIDI]
_CONTROL = {code: "�" for code in _CODES if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return *text* safe for a terminal: no escape sequences, no carriage returns.

    Log lines and file names come from processes that we do not trust.
    """
    return text.translate(_CONTROL)


# What went well and a user waits to hear: shown without a level, and not only when asked for.
NOTICE_LOGGER = "gpuops.news"


class _LineFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("gpuops: %(levelname)s: %(message)s")
        self._plain = logging.Formatter("gpuops: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if record.name == NOTICE_LOGGER:
            return printable(self._plain.format(record))
        return printable(super().format(record))


def log_notice(text: str) -> None:
    """Log *text* as good news: one line that `setup` has shown, as it has warnings."""
    logging.getLogger(NOTICE_LOGGER).info("%s", text)


class _LastResort(logging.Handler):
    """Takes the place of Python's own, which shows a message without saying whose it is."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return  # the program has configured logging, and shows it
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 boundary: as all handlers of Python's do
            self.handleError(record)


def logger_in_job(name: str) -> logging.Logger:
    """Return the logger *name*; a user's program that configures no logging shows its warnings.

    They look as those that `setup` shows.
    """
    logger = logging.getLogger("gpuops")
    if not logger.handlers:
        handler = _LastResort(logging.WARNING)
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)
    return logging.getLogger(name)


def setup(*, verbose: bool = False) -> None:
    """Send gpuops' own log lines to standard error; only the cli and the agent call this."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    logger = logging.getLogger("gpuops")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
    logging.getLogger(NOTICE_LOGGER).setLevel(logging.INFO)
