"""Draws the picture of the README: its first program on 8 devices, and the error of a step without a sum.

python docs/images/terminal.py docs/images/terminal.svg
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import distribute_jax as dj

README = Path(__file__).parents[2] / "README.md"
OURS, FORGOTTEN = (
    "dj.Optimizer(network, optax.adam(1e-2))",
    "nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param)",
)
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Rich's, which would be loaded from another host."""


def shown() -> list[str]:
    """Runs the programs of the README, and returns the lines of the terminal."""
    fit, step = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.DOTALL | re.M)
    assert OURS in step
    namespace: dict[str, object] = {}
    with redirect_stdout(StringIO()) as printed:
        exec(fit.replace("epochs=5", "epochs=3"), namespace)
    lines = ["$ python my_fit.py", *printed.getvalue().splitlines(), "", "$ python my_step.py"]
    try:
        exec(step.replace(OURS, FORGOTTEN), namespace)
    except dj.OutOfSyncError as error:
        return [*lines, *f"distribute_jax.OutOfSyncError: {error}".splitlines()]
    raise AssertionError("the step was not refused")


def draw(path: str) -> None:
    """Writes the picture."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, file=StringIO(), width=118, color_system="truecolor")
    for line in shown():
        style = (
            "bold" if line.startswith("$") else "red" if line.startswith("distribute_jax.") else ""
        )
        console.print(Text(line, style=style))
    svg = console.export_svg(title="fit on 8 devices, and a step that forgot to sum its gradients")
    Path(path).write_text(FONTS.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    dj.simulate(8)
    draw(sys.argv[1])
