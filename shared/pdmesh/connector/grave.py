"""How an engine knows that nothing writes into the memory of a dead helper process any more, on behalf of a peer either.

Another process of this host may be in the middle of a write into a helper's memory (UCX does it with process_vm_writev), and
then the kernel keeps that memory until the write is over, although the process is dead. So each helper maps a page of its own
for writing, and for as long as its memory is there the kernel refuses to seal that page: fcntl(2), F_SEAL_WRITE.
"""

import fcntl
import mmap
import os
import time

PAUSE_S = 0.001


class Grave:
    """The page of one helper. `fd` is for the helper to inherit and map."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pdmesh-grave", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)

    def is_closed(self, timeout_s: float) -> bool:
        """Whether nobody has the page mapped for writing; waits for that. Call when the helper is dead, or it may map it yet."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            except OSError:
                if time.monotonic() >= end_s:
                    return False
                time.sleep(PAUSE_S)
            else:
                return True

    def close(self) -> None:
        """Forget it."""
        os.close(self.fd)
