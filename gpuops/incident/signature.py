"""The signature of a failure: equal for two failures of the same bug, and for few others.

``KeyError at data.py:88 in collate: '#'``: the exception's type, the innermost frame in the user's
code, the message without what varies between attempts (numbers, addresses, paths, ids, ranks). The
line number is included: within one run it changes only if the program was edited, and then one more
attempt is right, while without it two bare ``assert``s in one function would be the same bug.

Only a root in user code has a signature, because a repeated signature ends the run, and an abort
whose log has the reason: an uncaught C++ exception or a failed assertion. Failures that CUDA, NCCL,
c10d, gloo, sockets, files, memory or another signal may have caused have none, also if the program
wrapped them in its own exception: then the cause is in the traceback.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from gpuops.incident import exception
from gpuops.incident.classify import ClassifiedExit, ending_signal
from gpuops.model import FailureClass, Role, Side, WorkerExit
from gpuops.scrub import scrub

MESSAGE_CHARS_MAX = 160
SIGNATURE_CHARS_MAX = 320
_READ_CHARS_MAX = 2000
# Without an exception only an exit code and a last line are known, which may have other causes: a
# repetition needs more occurrences than that of an exception.
WEAK_PREFIX = "exit "
# Where a rank stood still; the limit of its silence may have been too short.
HANG_PREFIX = "hang at "

_INFRASTRUCTURE_MODULE = re.compile(
    r"(?:torch\.distributed|requests|urllib3?|http|httpx|httpcore|aiohttp|socket|ssl|ftplib"
    r"|botocore|boto3|s3fs|gcsfs|adlfs|azure|google\.(?:api_core|cloud|auth)|fsspec|grpc|paramiko"
    r"|wandb|mlflow|huggingface_hub|subprocess|pynvml|zlib|zipfile|tarfile|lzma|h5py|sqlite3"
    r"|redis|psycopg|asyncpg|multiprocessing)\."
)
_INFRASTRUCTURE_TYPE = re.compile(
    r"(?:^|[\s:(])(?:[A-Za-z_]\w{0,60}\.){0,8}"
    r"(?:Connection(?:Refused|Reset|Aborted)?Error|BrokenPipeError|(?:OS|IO|Environment)Error"
    r"|File(?:NotFound|Exists)Error|PermissionError|(?:IsA|NotA)DirectoryError|TimeoutError"
    r"|BlockingIOError|InterruptedError|ChildProcessError|ProcessLookupError|EOFError|MemoryError"
    r"|OutOfMemoryError|AcceleratorError|KeyboardInterrupt|SystemError|UnpicklingError|BadZipFile"
    r"|SafetensorError|URLError|HTTP(?:Status)?Error|SSLError|(?:Read|Connect)Timeout|gaierror"
    r"|herror|Dist(?:Backend|Network|Store)?Error|NVMLError)(?=[\s:(]|$)"
)
_INFRASTRUCTURE_TEXT = re.compile(
    r"\bCUDA\b|\bHIP error|\bcu(?:BLAS|DNN|FFT|SPARSE|SOLVER)|\bCU(?:BLAS|DNN|DA|FFT)_|\bnccl|NCCL"
    r"|\b[Gg]loo\b|\bc10d\b|ProcessGroup|TCPStore|\bUCX\b|\bib[vu]_|NVML|nvidia|\bGPU is lost"
    r"|[Oo]ut of memory|[Cc]annot allocate memory|DefaultCPUAllocator|\[Errno \d+\]"
    r"|[Cc]onnection (?:refused|reset|aborted|closed|timed out|lost)|[Bb]roken pipe"
    r"|[Tt]imed? ?out\b|[Nn]o space left|[Qq]uota exceeded|[Ii]nput/output error"
    r"|[Ss]tale file handle|[Rr]ead-only file system|not connected|[Nn]ame resolution"
    r"|[Tt]oo many open files|DataLoader worker \(pid"
)
_OF_PROGRAM = {FailureClass.USER_EXCEPTION, FailureClass.COLLECTIVE_MISMATCH}
# gloo found that ranks call collectives with different sizes, or that a setting is wrong.
_GLOO_INVARIANT = "gloo::EnforceNotMet"
_TRANSIENT_CPP = frozenset({"std::bad_alloc", "std::system_error"})  # memory, threads, sockets
_SOURCE_PLACE = re.compile(r"^\[[^\]]{1,400}:\d+\]\s*")
_DEVICE = re.compile(r"CUDA|device-side")
_INSTALLED = re.compile(r"site-packages/|dist-packages/|^<frozen|/lib(?:64)?/python\d|^<string>$")
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<name>.{1,80}))?'
)

_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_ADDRESS = re.compile(
    r"\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
)
_PATH = re.compile(r"(?:[a-z][a-z0-9+]{1,9}://|~|\.{1,2})?/[^\s'\",;:()\[\]]{1,400}")
_HEX = re.compile(r"\b0[xX][0-9a-fA-F]+|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_NOT_FINITE = re.compile(r"[-+]?\b(?:nan|inf)\b", re.IGNORECASE)
_SPACE = re.compile(r"\s+")


def signature_of(classified: ClassifiedExit) -> str | None:
    """Return the signature of a worker's end, None unless the program itself explains it."""
    worker = classified.worker
    is_abort = classified.failure_class is FailureClass.ABORT or (
        classified.failure_class is FailureClass.COLLECTIVE_MISMATCH
        and ending_signal(worker) is not None
    )
    if classified.role is Role.ROOT and is_abort:
        return _abort_signature(classified)
    if not _is_program_failure(classified):
        return None
    if worker.exception_type is not None:
        kind, message = worker.exception_type, (worker.exception_message or "").strip()
        message = message.removeprefix(f"{kind.rpartition('.')[2]}: ")
        return _exception_signature(
            kind, message, worker.traceback, exception.exception_lines(worker)
        )
    printed = exception.printed_exception(worker.log_tail)
    if printed is not None:
        kind, _, message = printed.partition(": ")
        return _exception_signature(
            kind, message, worker.log_tail, exception.drop_frames(_last_traceback(worker))
        )
    return _exit_signature(classified)


def hang_signature(frames: Iterable[tuple[str, str]]) -> str | None:
    """Return the signature of a hang by its *frames* (file, function), the innermost first.

    The innermost of the user's own: a loop is not always met in the same line. None without frames.
    """
    known = list(frames)
    own = [frame for frame in known if not _INSTALLED.search(frame[0])] or known
    if not own:
        return None
    file, function = own[0]
    return f"{HANG_PREFIX}{PurePosixPath(file).name[:80]} in {function[:80]}"


def waiting_place(frames: Iterable[tuple[str, str]]) -> str | None:
    """Return where a thread waits by its *frames* (file, frame as text), the innermost first.

    All frames of the user's own, which ranks in one place have in common; None without any.
    """
    own = [text for file, text in frames if not _INSTALLED.search(file)]
    return " < ".join(own)[:SIGNATURE_CHARS_MAX] or None


def is_weak(signature: str) -> bool:
    """Return whether *signature* is that of an exit code alone, or of a place without progress."""
    return signature.startswith((WEAK_PREFIX, HANG_PREFIX))


def normalize(message: str) -> str:
    """Return *message* as one bounded line without what varies between attempts."""
    text = scrub(message[:_READ_CHARS_MAX])
    for pattern in (_UUID, _PATH, _ADDRESS, _HEX, _NUMBER, _NOT_FINITE):
        text = pattern.sub("#", text)
    text = _SPACE.sub(" ", re.sub(r"#(?:[ ,x.:]{0,3}#)+", "#", text)).strip()
    return text[:MESSAGE_CHARS_MAX].rstrip()


def innermost_frame(lines: Iterable[str]) -> str | None:
    """Return ``"data.py:88 in collate"``, the innermost frame of the user's own code in *lines*.

    If every frame is in installed packages it is the innermost of those: training code is often an
    installed package.
    """
    frames = [match for line in lines if (match := _FRAME.match(exception.strip_rank_prefix(line)))]
    own = [frame for frame in frames if not _INSTALLED.search(frame["file"])] or frames
    if not own:
        return None
    name = (own[-1]["name"] or "").strip()
    where = f"{PurePosixPath(own[-1]['file']).name[:80]}:{own[-1]['line']}"
    return f"{where} in {name}" if name else where


def _is_program_failure(classified: ClassifiedExit) -> bool:
    """Return whether only the program itself explains the end; a teardown may have raised."""
    worker = classified.worker
    if classified.role is Role.TEARDOWN:
        return worker.exception_type is not None
    return (
        classified.role is Role.ROOT
        and classified.failure_class in _OF_PROGRAM
        and classified.side is Side.USER
        and (worker.exception_type is not None or ending_signal(worker) is None)
    )


def _exception_signature(
    kind: str, message: str, trace: Sequence[str], lines: Sequence[str]
) -> str | None:
    if _is_infrastructure(kind, [message, *lines]):
        return None
    where = innermost_frame(trace)
    head = f"{kind[:80]} at {where}" if where else kind[:80]
    message_text = normalize(message.partition("\n")[0])
    return (f"{head}: {message_text}" if message_text else head)[:SIGNATURE_CHARS_MAX]


def _abort_signature(classified: ClassifiedExit) -> str | None:
    """Return the signature of an abort by its reason, None where that is not known.

    The place in a library's source says who noticed, not what failed.
    """
    reason = " ".join(classified.lines[:1]).strip()
    kind, _, message = reason.partition(": ")
    judged = "" if kind == _GLOO_INVARIANT else kind
    if (
        not reason
        or (classified.is_specific and classified.side is not Side.USER)  # such as a damaged heap
        or kind in _TRANSIENT_CPP
        or _is_infrastructure(judged, [_SOURCE_PLACE.sub("", message)])
    ):
        return None
    return f"abort by {normalize(reason)}"[:SIGNATURE_CHARS_MAX]


def _is_infrastructure(kind: str, lines: Iterable[str]) -> bool:
    if _INFRASTRUCTURE_MODULE.match(kind):
        return True
    texts = [kind, *(line[:_READ_CHARS_MAX] for line in lines)]
    return any(_INFRASTRUCTURE_TYPE.search(t) or _INFRASTRUCTURE_TEXT.search(t) for t in texts)


def _exit_signature(classified: ClassifiedExit) -> str | None:
    """Return the signature of an exit code with a last line; a bare code has none.

    It is weak, unless a rule matches the line as the program's own.
    """
    last_line = " ".join(classified.lines[:1]).strip()
    if not last_line:
        return None
    text = f"{classified.worker.exit_code}: {normalize(exception.strip_rank_prefix(last_line))}"
    if classified.is_specific and not _DEVICE.search(last_line):
        return f"code {text}"[:SIGNATURE_CHARS_MAX]
    return (
        None
        if _is_infrastructure("", classified.lines)
        else f"{WEAK_PREFIX}{text}"[:SIGNATURE_CHARS_MAX]
    )


def _last_traceback(worker: WorkerExit) -> list[str]:
    """Return the log from the first traceback on: in a chain the cause is above the last."""
    tail = [exception.strip_rank_prefix(line) for line in worker.log_tail]
    start = next((i for i, line in enumerate(tail) if line.startswith("Traceback (most")), 0)
    return tail[start:]
