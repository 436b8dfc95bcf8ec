"""State that lies in one place between steps, apart from the mesh: sent at each call, fetched after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from distribute_jax._internals import uncommitted
from distribute_jax.program.lowering._lower import Layouts
from distribute_jax.program.lowering._lowerings import Compile, Compiled
from distribute_jax.program.tracing._trace import Call


@dataclass(frozen=True)
class Home:
    """The one device, and the kind of its memory, where state lies between steps."""

    device: jax.Device
    memory_kind: str | None = None
    """As ``device.addressable_memories()`` names it; None for the device's default memory."""

    @property
    def state(self) -> SingleDeviceSharding:
        """Where variables lie."""
        return SingleDeviceSharding(self.device, memory_kind=self.memory_kind)

    @property
    def results(self) -> SingleDeviceSharding:
        """Where mirrored results lie: in memory that any computation can read."""
        return SingleDeviceSharding(self.device)


def at_home(compile_on_mesh: Compile, home: Home) -> Compile:
    """Gives a lowering whose programs take and leave what is mirrored at home."""

    def compile_at_home(
        call: Call,
        one_replica: Compiled,
        lies: Layouts,
        avals: Sequence[Any],
        donated: Sequence[int],
    ) -> Compiled:
        compiled = compile_on_mesh(call, one_replica, lies, avals, donated)
        return _sending(compiled, home, call.mesh, lies, tuple(donated))

    return compile_at_home


def _sending(
    compiled: Compiled, home: Home, mesh: Mesh, lies: Layouts, donated: tuple[int, ...]
) -> Compiled:
    """Sends the inputs, runs the program, and fetches one replica's copy of what is mirrored."""
    wanted = lies.in_shardings(mesh)
    devices = [d for d in mesh.devices.flat if d.process_index == home.device.process_index]
    near = devices.index(home.device) if home.device in devices else 0
    fetched = [i for i, mirrored in enumerate(lies.mirrored) if mirrored]
    to = [home.state if i < lies.state else home.results for i in fetched]

    def run(*flat: Any) -> list[Any]:
        outs = list(compiled(*_sent(flat, wanted)))
        for i in donated:
            if isinstance(flat[i], jax.Array):
                flat[i].delete()  # what was sent is used up, and the new value needs the room
        copies = jax.device_put([outs[i].addressable_data(near) for i in fetched], to)
        for i, copy in zip(fetched, copies, strict=True):
            outs[i] = copy if i < lies.state else uncommitted(copy)
        return outs

    return run


def _sent(flat: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """Puts every array where the program takes it, in one call; numbers stay as they are."""
    arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
    there = jax.device_put([flat[i] for i in arrays], [wanted[i] for i in arrays])
    sent = list(flat)
    for i, array in zip(arrays, there, strict=True):
        sent[i] = array
    return sent
