"""Parts of the package that are loaded when one of their names is first read, so that importing is quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distribute_jax._instead import missing
from distribute_jax._public import publish


def load_later(
    namespace: dict[str, Any], parts: Mapping[str, Sequence[str]], public: str | None = None
) -> Callable[[str], Any]:
    """Gives the ``__getattr__`` of a package that loads some of its modules when they are first read.

    Args:
        namespace: the globals of the package; a name that was read is kept there.
        parts: the modules directly below the package, with the names that it takes from each. The
            modules themselves can be read too.
        public: where users import the names from, if not from the package.
    """
    package: str = namespace["__name__"]
    home = {name: part for part, names in parts.items() for name in names}

    def load(name: str) -> Any:
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise missing(package, f"module {package!r}", name)
        namespace[name] = getattr(load(home[name]), name)
        publish(namespace, [name], public or package)
        return namespace[name]

    return load
