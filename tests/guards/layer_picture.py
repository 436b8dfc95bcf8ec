"""The picture of the layers in docs/architecture.md, drawn from the imports.

    python tests/guards/layer_picture.py    draws it again

An arrow means "imports"; one that follows from others is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from source_tree import LIBRARY, modules, resolved

PAGE = LIBRARY.parent / "docs" / "architecture.md"
BLOCK = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)
BASE = "base"
"""The files directly in the package: errors, meshes, values, messages, private JAX."""


def picture(package: Path) -> str:
    """Returns the packages of the library and who imports whom, as a Mermaid flowchart."""
    known = modules(package)
    imports: dict[str, set[str]] = defaultdict(set)
    for module in known.values():
        part = _part(module.name)
        for found in module.imports:
            target = resolved(found.target, known)
            if part and target and _part(target) not in (None, part):
                imports[part].add(str(_part(target)))
    below = {part: _reached(part, imports) for part in imports}
    lines = [
        f"    {part} --> {other}"
        for part in sorted(imports)
        for other in sorted(imports[part])
        if not any(other in below.get(between, ()) for between in imports[part] - {other})
    ]
    return "\n".join(["flowchart TD", *lines, ""])


def _part(module: str) -> str | None:
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ("__main__", "callbacks", "experimental"):
        return None  # what only lists public names
    return BASE if parts[1].startswith("_") else parts[1]


def _reached(part: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    ahead = list(imports[part])
    while ahead:
        one = ahead.pop()
        if one not in reached:
            reached.add(one)
            ahead += imports.get(one, ())
    return reached


if __name__ == "__main__":
    drawn = picture(LIBRARY)
    PAGE.write_text(BLOCK.sub(lambda _: drawn, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
