"""One file for each kind of source of global batches, and those that the library makes itself.

``_base`` says what a source can be asked. ``_iterables``, ``_grain``, ``_tf_data``, ``_torch`` and
``_hugging_face`` adapt what users have; ``_arrays`` and ``_files`` are the library's own. None imports a
package that may be missing.
"""

from distribute_jax.data.sources._arrays import ArrayDataset, from_arrays
from distribute_jax.data.sources._files import FileDataset, from_files

__all__ = ["ArrayDataset", "FileDataset", "from_arrays", "from_files"]
