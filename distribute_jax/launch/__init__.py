"""Processes that are started, watched and ended together.

``_attach`` is run as a file, in front of each program. ``_process`` holds the processes of one attempt on
this machine; ``_verdict`` decides what happens after it, and ``_supervisor`` does it. ``_machines`` asks
the supervisors of other machines, through the ``_hub`` of node 0.
"""

from distribute_jax.launch._hub import (
    SECRET as SECRET,
    Wire as Wire,
    WireError as WireError,
    own_flags as own_flags,
)
from distribute_jax.launch._machines import (
    Link as Link,
    Machines as Machines,
    OneMachine as OneMachine,
)
from distribute_jax.launch._process import Inbox as Inbox
from distribute_jax.launch._supervisor import (
    CACHE as CACHE,
    Launch as Launch,
    cache_folder as cache_folder,
    say as say,
    supervise as supervise,
)

__all__ = [
    "CACHE",
    "SECRET",
    "Inbox",
    "Launch",
    "Link",
    "Machines",
    "OneMachine",
    "Wire",
    "WireError",
    "cache_folder",
    "own_flags",
    "say",
    "supervise",
]
