"""An element that may be absent."""

from __future__ import annotations

from distribute_jax._errors import ArgumentError
from distribute_jax._typing import PyTree


class OptionalElement:
    """What ``get_next_as_optional`` gives: an element, or the fact that the data has ended.

    Source: https://www.tensorflow.org/api_docs/python/tf/experimental/Optional
    """

    __module__ = "distribute_jax"

    def __init__(self, *element: PyTree) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Tells whether there is an element."""
        return bool(self._element)

    def get_value(self) -> PyTree:
        """Gives the element; an ArgumentError where there is none."""
        if not self._element:
            raise ArgumentError(
                "get_value() was called on an optional element without a value: the dataset has "
                "ended. Ask has_value() first."
            )
        return self._element[0]
