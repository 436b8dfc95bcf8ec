"""What the programs of the gallery share: the digits of scikit-learn, batches, and the command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import distribute_jax as dj

Arrays = tuple[np.ndarray, ...]


def digits() -> tuple[Arrays, Arrays]:
    """Returns 1,437 images (8, 8, 1) and labels to train on and 360 to test with, always the same."""
    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images, labels = (loaded.images[..., None] / 16).astype(np.float32)[order], loaded.target[order]
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def batches(size: int, steps: int, *arrays: np.ndarray, whole: bool = False) -> Iterator[Arrays]:
    """Yields some global batches, shuffled in each epoch; ``whole`` leaves out an epoch's partial one."""
    random = np.random.default_rng(0)
    while steps > 0:
        order = random.permutation(len(arrays[0]))
        for start in range(0, len(order) - (size - 1 if whole else 0), size)[:steps]:
            steps -= 1
            yield tuple(array[order[start : start + size]] for array in arrays)


def command(train: Callable[[int], tuple[list[float], Any]], report: Callable[[Any], str]) -> None:
    """Trains on simulated devices, or on those that JAX finds; prints the result and the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--devices", default="8", help="simulated CPU devices (8), or 'real': those that JAX finds"
    )
    devices = parser.parse_args().devices
    if devices != "real":
        dj.simulate(int(devices))
    started = time.perf_counter()
    count = dj.MirroredStrategy().num_replicas_in_sync
    losses, trained = train(count)
    print(f"{report(trained)}, loss {losses[0]:.3f} → {losses[-1]:.3f}", end=", ")
    print(
        f"{len(losses)} steps on {count} devices in {time.perf_counter() - started:.0f} s", end=""
    )
    print(f" ({time.process_time():.0f} s of CPU)")
