"""A FUSE server that answers nothing: ``python hung_fuse.py DIRECTORY``, as root."""

import ctypes
import os
import struct
import sys

_INIT = 26
READY = b"ready\n"


def serve(point):
    """Mount FUSE on *point* as user 1000 would; answer only the kernel's first request."""
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=1000,group_id=1000,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"/dev/sda1", os.fsencode(point), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    request = os.read(fuse, 2**17)
    _, opcode, unique = struct.unpack_from("<IIQ", request)
    assert opcode == _INIT
    # struct fuse_init_out of linux/fuse.h, protocol 7.31.
    body = struct.pack("<IIIIHHI", 7, 31, 0, 0, 16, 12, 65536) + bytes(40)
    os.write(fuse, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
    os.write(1, READY)
    while True:
        os.read(fuse, 2**17)


if __name__ == "__main__":
    serve(sys.argv[1])
