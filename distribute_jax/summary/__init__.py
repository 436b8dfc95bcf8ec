"""Event files for TensorBoard from your own loops: ``tf.summary``'s names, one file per job."""

from distribute_jax._lazy import publish
from distribute_jax.summary._write import (
    SummaryWriter,
    create_file_writer,
    flush,
    histogram,
    image,
    scalar,
    text,
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
