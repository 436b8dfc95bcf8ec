"""Stand-ins for TPU devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One core, with the attributes of a JAX device."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"


def hosts(across: int, down: int, kind: str = "TPU v4", cores: int = 1) -> list[Chip]:
    """Returns a grid of hosts of 2 × 2 chips, numbered along x; ids count chip by chip, host by host."""
    chips: list[Chip] = []
    for host in range(across * down):
        x, y = 2 * (host % across), 2 * (host // across)
        for chip in range(4):
            at = (x + chip % 2, y + chip // 2, 0)
            chips += [
                Chip(len(chips) + core, host, at, core, device_kind=kind) for core in range(cores)
            ]
    return chips


def slices(count: int) -> list[Chip]:
    """Returns slices of one host each, whose coordinates are equal."""
    return [
        Chip(4 * number + chip.id, number, chip.coords, slice_index=number)
        for number in range(count)
        for chip in hosts(1, 1)
    ]
