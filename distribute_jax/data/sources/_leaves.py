"""The tensors of other libraries in a batch become NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribute_jax._errors import ArgumentError
from distribute_jax._tree import error_text, path_text
from distribute_jax._typing import KeyPath, PyTree


def loaded_class(module: str, *names: str) -> Any:
    """Gives a class of a package that is imported already, else an empty tuple, for isinstance.

    Nothing is an instance of a class that was never loaded, so no package needs to be imported here.
    """
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return () if found is None else found


def on_host(batch: PyTree) -> PyTree:
    """Turns PyTorch's and TensorFlow's tensors in a batch into NumPy arrays.

    They share their memory with the tensor where the library allows it. Other leaves stay as they are.

    Raises:
        ArgumentError: a tensor is none that NumPy can hold; names the leaf.
    """
    torch_tensor = loaded_class("torch", "Tensor")
    tf_tensor = loaded_class("tensorflow", "Tensor")
    if torch_tensor == () and tf_tensor == ():
        return batch

    def convert(path: KeyPath, leaf: Any) -> Any:
        try:
            if isinstance(leaf, torch_tensor):
                return _from_torch(leaf)
            return leaf.numpy() if isinstance(leaf, tf_tensor) else leaf
        except Exception as error:
            raise ArgumentError(
                f"{path_text(path, 'batch')} is a {type(leaf).__name__} that has no NumPy "
                f"counterpart: {error_text(error)} Give the batch dense tensors of numbers."
            ) from None

    return jax.tree.map_with_path(convert, batch)


def _from_torch(tensor: Any) -> np.ndarray[Any, Any]:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(dense.dtype).removeprefix("torch.")
    # NumPy has no such dtypes of its own, so PyTorch refuses to convert them; JAX's have the same bits.
    extended = name == "bfloat16" or name.startswith("float8")
    if not extended:
        array: np.ndarray[Any, Any] = dense.numpy()
        return array
    dtype = np.dtype(getattr(jnp, name))
    bits = sys.modules["torch"].int16 if dtype.itemsize == 2 else sys.modules["torch"].uint8
    same_bits: np.ndarray[Any, Any] = dense.view(bits).numpy().view(dtype)
    return same_bits
