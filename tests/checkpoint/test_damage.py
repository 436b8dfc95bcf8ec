"""Damage to the newest step is detected or harmless: it warns, and the step before is used."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import distribute_jax as dj
from distribute_jax.checkpoint import _storage, load, save

Damage = Callable[[Path, np.random.Generator], None]


def flip(file: Path, random: np.random.Generator) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    if content:
        content[random.integers(len(content))] ^= 1 << random.integers(8)
    file.write_bytes(content)


def truncate(file: Path, random: np.random.Generator) -> None:
    """Cuts a file off somewhere."""
    content = file.read_bytes()
    file.write_bytes(content[: random.integers(max(1, len(content)))])


def delete(file: Path, random: np.random.Generator) -> None:
    """Removes a file."""
    file.unlink()


def garbage(file: Path, random: np.random.Generator) -> None:
    """Writes as many bytes of something else."""
    file.write_bytes(random.bytes(file.stat().st_size))


def zeros(file: Path, random: np.random.Generator) -> None:
    """What some file systems leave after a power failure."""
    file.write_bytes(bytes(file.stat().st_size))


def longer(file: Path, random: np.random.Generator) -> None:
    """Appends bytes."""
    file.write_bytes(file.read_bytes() + random.bytes(5))


def empty_step(file: Path, random: np.random.Generator) -> None:
    """The folder of the step is there and empty."""
    step = next(p for p in file.parents if p.name == "2")
    shutil.rmtree(step)
    step.mkdir()


def wrong_step(file: Path, random: np.random.Generator) -> None:
    """The step of another number, copied to this one's place."""
    step = next(p for p in file.parents if p.name == "2")
    shutil.rmtree(step)
    shutil.copytree(step.parent / "1", step)


FILE_DAMAGES: tuple[Damage, ...] = (flip, truncate, delete, garbage, zeros, longer)
STEP_DAMAGES: tuple[Damage, ...] = (empty_step, wrong_step)
TRIALS = 300


def tree_of(seed: int) -> dict[str, Any]:
    """A few arrays that compress well and badly, and Python values, which the manifest holds."""
    random = np.random.default_rng(seed)
    return {
        "weight": nnx.Param(jnp.asarray(random.normal(size=(40, 10)), jnp.float32)),
        "zeros": np.full((30,), seed, np.int64),
        "step": seed,
        "text": f"step {seed}",
    }


def digest(tree: dict[str, Any]) -> Any:
    """Returns a digest of every bit."""
    weight = np.asarray(tree["weight"][...]).tobytes()
    return weight, tree["zeros"].tobytes(), tree["step"], tree["text"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("sound")
    with dj.CheckpointManager(directory) as manager:
        for step in (1, 2):
            manager.save(step, tree_of(step))
    return directory


def damages(sound: Path) -> list[tuple[Damage, str]]:
    """Yields damages of each file of step 2, several bits of each, and of the complete step."""
    files = sorted(p.relative_to(sound).as_posix() for p in (sound / "2").rglob("*") if p.is_file())
    found = [(damage, file) for damage in FILE_DAMAGES for file in files]
    last = [(damage, files[0]) for damage in STEP_DAMAGES]  # these are not mended
    while len(found) < TRIALS:
        found += [(flip, file) for file in files]
    return found[: TRIALS - len(last)] + last


def outcome(directory: Path, damage: Damage, file: str, seed: int) -> str:
    """Restores after a damage, returns the outcome, and repairs it."""
    before = b"" if damage in STEP_DAMAGES else (directory / file).read_bytes()
    damage(directory / file, np.random.default_rng(seed))
    manager, tree = dj.CheckpointManager(directory), tree_of(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = manager.restore_latest(tree)
    aside = (directory / "2.damaged").exists()
    if aside:
        (directory / "2.damaged").rename(directory / "2")
    if damage not in STEP_DAMAGES:
        (directory / file).write_bytes(before)
    if digest(tree) != digest(tree_of(step or 0)):
        return "silently wrong"
    if step == 2:
        return "harmless" if not aside and not caught else "set aside without need"
    is_warned = len(caught) == 1 and "step 2 is damaged and was set aside as 2.damaged" in str(
        caught[0].message
    )
    return "found" if step == 1 and aside and is_warned else "not warned"


@pytest.mark.exhaustive
def test_300_random_damages_are_detected_or_harmless(sound: Path, tmp_path: Path) -> None:
    """None restores other numbers; each that is detected is a warning, and step 1 is restored."""
    shutil.copytree(sound, tmp_path / "d")
    outcomes = [
        (outcome(tmp_path / "d", damage, file, seed), damage.__name__, file)
        for seed, (damage, file) in enumerate(damages(sound))
    ]
    wrong = [o for o in outcomes if o[0] not in ("found", "harmless")]
    assert (len(outcomes), wrong) == (TRIALS, [])
    arrays = [kind for kind, _, file in outcomes if "arrays-" in file]
    assert len(arrays) > TRIALS // 2
    assert set(arrays) == {"found"}


def manifest(step: Path) -> Path:
    return step / "manifest.json"


def metadata(step: Path) -> Path:
    return next(step.glob("arrays-*/whole-0/_METADATA"))


REASONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda step: manifest(step).unlink(), "has no manifest.json"),
    "half a manifest": (lambda step: manifest(step).write_text('{"sha256"'), "json cannot be read"),
    "a changed value": (
        lambda step: manifest(step).write_text(
            manifest(step).read_text().replace("step 2", "step 3")
        ),
        "manifest.json is not what was written",
    ),
    "a deleted file": (lambda step: metadata(step).unlink(), "_METADATA: missing"),
    "a short file": (lambda step: metadata(step).write_text("{}"), "_METADATA: other bytes than"),
    "no arrays": (lambda step: shutil.rmtree(next(step.glob("arrays-*"))), "ocdbt: missing"),
    "another step": (lambda step: step.rename(step.parent / "7"), "7 contains step 2; was it"),
}


@pytest.mark.parametrize("case", REASONS)
def test_the_warning_describes_the_damage(case: str, sound: Path, tmp_path: Path) -> None:
    """``restore`` of that step raises, and sets nothing aside."""
    damage, reason = REASONS[case]
    shutil.copytree(sound, tmp_path / "d")
    damage(tmp_path / "d" / "2")
    manager, tree = dj.CheckpointManager(tmp_path / "d"), tree_of(9)
    step = 7 if case == "another step" else 2
    with pytest.raises(dj.CheckpointDamagedError, match=reason):
        manager.restore(step, tree)
    assert digest(tree) == digest(tree_of(9))
    with pytest.warns(RuntimeWarning, match=rf"(?s)step {step} is damaged.*{reason}"):
        assert manager.restore_latest(tree) == 1
    assert manager.all_steps() == [1]
    assert (tmp_path / "d" / f"{step}.damaged").is_dir()
    assert digest(tree) == digest(tree_of(1))


def rewrite_numbers(step: Path) -> None:
    """Writes other numbers of the same sizes into valid files: only the digests show it."""
    other = step.parent.parent / "other"
    save(other, tree_of(5) | {"text": "step 2", "step": 2})
    manifest = json.loads((step / "manifest.json").read_text())["content"]
    (arrays,) = step.glob("arrays-*")
    shutil.rmtree(arrays)
    shutil.copytree(next(other.glob("arrays-*")), step / manifest["arrays"])


def test_changed_values_in_valid_files_are_detected_by_digests(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are named; the digests of files are left out of the comparison here."""
    shutil.copytree(sound, tmp_path / "d")
    rewrite_numbers(tmp_path / "d" / "2")
    monkeypatch.setattr(_storage, "check_files", lambda *_: None)
    with pytest.raises(dj.CheckpointDamagedError, match=r"(?s)sha256 differs.*weight.*zeros"):
        dj.CheckpointManager(tmp_path / "d").restore(2, tree_of(9))


def test_damage_of_every_step_is_an_error_at_each_restore(sound: Path, tmp_path: Path) -> None:
    """Not None: the training would silently start from the beginning. A file called 9 is not a step."""
    shutil.copytree(sound, tmp_path / "d")
    for step in "12":
        (tmp_path / "d" / step / "manifest.json").unlink()
    (tmp_path / "d" / "9").touch()
    (tmp_path / "d" / "notes").mkdir()
    manager = dj.CheckpointManager(tmp_path / "d")
    with (
        pytest.warns(RuntimeWarning, match="step 2 is damaged"),
        pytest.warns(RuntimeWarning, match="step 1 is damaged"),
        pytest.raises(dj.CheckpointDamagedError, match=r"damaged are 1\.damaged, 2\.damaged"),
    ):
        manager.restore_latest(tree_of(9))
    with pytest.raises(dj.CheckpointDamagedError, match="from the beginning in another one"):
        manager.restore_latest(tree_of(9))
    manager.save(2, tree_of(2))
    manager.wait()
    (tmp_path / "d" / "2" / "manifest.json").unlink()
    with (
        pytest.warns(RuntimeWarning, match=r"set aside as 2\.damaged-2"),
        pytest.raises(dj.CheckpointDamagedError),
    ):
        manager.restore_latest(tree_of(9))


def test_load_raises_for_damage(tmp_path: Path) -> None:
    """A single checkpoint has none before it."""
    save(tmp_path / "c", tree_of(1))
    flip(tmp_path / "c" / "manifest.json", np.random.default_rng(0))
    with pytest.raises(dj.CheckpointDamagedError, match=r"manifest\.json"):
        load(tmp_path / "c", tree_of(2))
