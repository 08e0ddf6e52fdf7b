"""Several processes of one script that import the libraries once, which takes longer than what they do."""

import gc
import os
import signal
import socket
import sys


def fork_ranks(count: int) -> None:
    """Return in `count` processes, with the variables that torchrun sets; this one ends with them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **size}
    pids = []
    gc.freeze()  # trainers search for garbage, which would take a second each time among what the imports have made
    for rank in range(count):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:  # the others would wait for it
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)
