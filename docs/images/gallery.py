"""Draws the pictures of docs/gallery.md, after training their programs on 8 simulated devices.

python docs/images/gallery.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib import pyplot

import distribute_jax as dj

IMAGES = Path(__file__).parent
sys.path.append(str(IMAGES.parents[1] / "examples" / "gallery"))


def draw(name: str, images: np.ndarray) -> None:
    """Draws 24 images in two rows."""
    framed = np.pad(images.reshape(2, 12, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = framed.transpose(0, 2, 1, 3).reshape(20, 120)
    pyplot.imsave(IMAGES / f"gallery_{name}.png", rows.repeat(4, 0).repeat(4, 1), cmap="gray_r")


def draw_losses(name: str, losses: list[float]) -> None:
    """Draws the loss of each step."""
    figure, axes = pyplot.subplots(figsize=(2.4, 1.6), layout="constrained")
    axes.plot(losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", title=name)
    figure.savefig(IMAGES / f"gallery_{name}.png", dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    dj.simulate(8)
    import gan
    import lm
    import mnist
    import resnet
    import seq2seq
    import simclr
    import sst2
    import vae

    for program in (mnist, resnet, lm, seq2seq, sst2):
        draw_losses(program.__name__, program.train(8)[0])
    for program in (vae, gan):
        draw(program.__name__, program.sample(program.train(8)[1], 24))
    draw("simclr", np.concatenate([simclr.view(simclr.TEST[0][:12], seed) for seed in (0, 1)]))
