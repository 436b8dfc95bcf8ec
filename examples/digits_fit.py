"""Train the CNN of digits.py with compile and fit, over several replicas.

    python examples/digits_fit.py                    8 simulated devices, on any machine
    python examples/digits_fit.py --replicas 4       only four of them
    python examples/digits_fit.py --devices real     the GPUs, TPU cores or CPU that JAX finds

The model and the images are those of digits.py; `dj.Model` has the steps and the loops.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from digits import CNN, SIMULATED_DEVICES, load_data, parser
from flax import nnx

import distribute_jax as dj


def make_model(strategy: dj.Strategy) -> dj.Model:
    """Builds and compiles the CNN under the strategy."""
    with strategy.scope():
        model = dj.Model(CNN(jnp.float32, rngs=nnx.Rngs(0)))
    model.compile(
        optimizer=optax.adam(3e-3),
        loss=dj.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and prints the accuracy on the test images."""
    options = parser(__doc__).parse_args(arguments)
    if options.devices == "simulated":
        dj.simulate(SIMULATED_DEVICES)
    strategy = dj.MirroredStrategy(list(range(options.replicas or jax.device_count())))
    train, test = load_data()
    model = make_model(strategy)

    print(
        f"compile and fit: training on {len(train.labels)} images, over "
        f"{strategy.num_replicas_in_sync} replicas ({jax.devices()[0].device_kind})."
    )
    model.fit(
        train.images,
        train.labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test.images, test.labels),
    )
    _, accuracy = model.evaluate(test.images, test.labels, options.batch_size, verbose=0)
    print(f"Test accuracy: {accuracy:.4f}, on {len(test.labels)} other images.")


if __name__ == "__main__":
    sys.exit(main())
