"""Calls on the memory of buffers, also of read-only ones, that let other Python threads run."""

import ctypes
import errno
import os
from functools import cache
from typing import Any

_PYBUF_SIMPLE = 0  # CPython's object.h


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(buffer: object) -> int:
    """Return where the memory of a contiguous buffer begins; it must be kept alive meanwhile."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(
        ctypes.py_object(buffer), ctypes.byref(found), _PYBUF_SIMPLE
    )
    try:
        return found.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy *source* into *target*, which has the same length."""
    assert len(target) == len(source)
    ctypes.memmove(address_of(target), address_of(source), len(target))


def madvise(buffer: object, begin: int, nbytes: int, advice: int) -> None:
    """Give the kernel *advice* on a part of *buffer*, which is a mapping.

    Raises:
        OSError: The kernel refuses.
    """
    libc, address = _libc(), address_of(buffer) + begin
    while libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        if number not in {errno.EINTR, errno.EAGAIN}:
            raise OSError(number, os.strerror(number))


@cache
def _libc() -> Any:  # noqa: ANN401 a library, whose functions are made when they are first used
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
