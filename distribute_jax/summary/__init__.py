"""Event files for TensorBoard from loops of your own: ``tf.summary``'s names, one file per job."""

from distribute_jax._lazy import publish
from distribute_jax.summary._write import (
    histogram as histogram,
    image as image,
    scalar as scalar,
    text as text,
)
from distribute_jax.summary._writer import (
    SummaryWriter as SummaryWriter,
    create_file_writer as create_file_writer,
    flush as flush,
)

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "flush",
    "histogram",
    "image",
    "scalar",
    "text",
]

publish(globals(), __all__, "distribute_jax.summary")
