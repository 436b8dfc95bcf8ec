"""Ties a process to its supervisor, and then becomes the program: run as a file, in front of it.

When the supervisor is gone, however it ended, the kernel ends the process, even one that is stopped or hangs
in C code. Only Linux offers this; elsewhere a supervisor that is killed leaves its processes behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h; it lasts through exec

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # the supervisor was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(sys.argv[2], sys.argv[2:])
