"""The exit codes by which a process tells its supervisor why it ended."""

SAVED = 42
"""All processes saved at one common step after a preemption: start them again, or leave for good."""

HUNG = 43
"""The watchdog ended this process, which made no progress."""

OTHER_FAILED = 44
"""This process is well, and ended because another one failed."""

PARTED = 45
"""The processes no longer do the same."""

MEANING = {
    SAVED: "saved after a preemption",
    HUNG: "made no progress and was ended by its watchdog",
    OTHER_FAILED: "ended because another process failed",
    PARTED: "no longer did the same as the others",
}
"""What the supervisor says of a process that ended with the code."""
