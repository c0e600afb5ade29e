"""Processes that move bytes when a test tells them to, by files, connections or children."""

import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def told(text, *args):
    """Run Python code that does something for each line that it is given and answers it."""
    body = f"import os, socket, subprocess, sys\n{text}\nprint('ready', flush=True)\n"
    loop = "for line in sys.stdin:\n    act(int(line))\n    print('done', flush=True)\n"
    command = [sys.executable, "-c", body + loop, *map(str, args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout.readline() == "ready\n"

        def tell(number):
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"

        yield child.pid, tell
        child.stdin.close()


READS = "def act(n): os.read(os.open('/dev/zero', os.O_RDONLY), n)"
CHILD = """
text = "import os, sys; f = os.open('/dev/zero', 0)"
text += "; [print(len(os.read(f, int(n))), flush=True) for n in sys.stdin]"
child = subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True)
def act(n):
    child.stdin.write(str(n) + chr(10))
    child.stdin.flush()
    child.stdout.readline()
"""
READS_IN_A_THREAD = f"""
import threading
{READS.replace("act", "read")}
def act(n):
    thread = threading.Thread(target=read, args=(n,))
    thread.start()
    thread.join()
"""
# Listens, on the port that it writes to a file.
SENDS = """
server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
open(sys.argv[1], "w").write(str(server.getsockname()[1]))
near = []
def act(n):
    near[:] = near or [server.accept()[0]]
    near[0].sendall(bytes(n))
"""
RECEIVES = """
host = (sys.argv[2:] or ["127.0.0.1"])[0]
far = socket.create_connection((host, int(sys.argv[1])))
def act(n):
    while n > 0:
        n -= len(far.recv(n))
"""
