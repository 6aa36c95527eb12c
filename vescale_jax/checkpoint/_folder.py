"""Folder: the checkpoints of one run, side by side, and what they are called.

Comes in: a folder. Goes out: its complete checkpoints, oldest first. A checkpoint is called `000012-step-00000300`: the
first number counts saves, so that a run which went back to an older step has its newest save last. Names that start
with a dot are unfinished or about to be removed.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ._files import COMPLETE, MANIFEST, sync_folder, writing

_NAME = re.compile(r"(\d{6,})-step-(\d{8,})")
_PARTIAL, _GONE = ".partial-", ".gone-"


@dataclass(frozen=True, slots=True, order=True)
class Saved:
    """A complete checkpoint.

    Attributes:

    - `number`: of the save.
    - `step`: steps done.
    - `path`: its folder.
    """

    number: int
    step: int
    path: Path


def saved(folder: Path) -> list[Saved]:
    """The complete checkpoints in a folder, oldest first."""
    found: list[Saved] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / COMPLETE).is_file():
            found.append(Saved(int(match[1]), int(match[2]), path))
    return sorted(found)


def unmarked(folder: Path) -> list[Path]:
    """Folders that are called checkpoints and are newer than all that are complete, oldest first.

    A save names its folder last, so these have lost their marker: deleted, or not copied whole.
    """
    newest = max((item.number for item in saved(folder)), default=0)
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not (path / COMPLETE).is_file() and int(match[1]) > newest:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def next_name(folder: Path, step: int) -> str:
    """The name of the next save."""
    taken = [int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return f"{max(taken, default=0) + 1:06d}-step-{step:08d}"


def partial(path: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return path.with_name(_PARTIAL + path.name)


def absolute(path: "str | os.PathLike[str]", what: str) -> Path:
    """A path that stays the same when the process changes its folder.

    Raises: `ValueError` for an address of an object store, which would be taken for a folder here.
    """
    text = os.fspath(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{what}: got {text!r}; want a path of a file system, since object stores cannot rename; mount the store, "
            "or save to a disk and copy complete checkpoints"
        )
    return Path(text).absolute()


def publish(path: Path) -> None:
    """Gives a checkpoint that is complete under its partial name its own."""
    partial(path).rename(path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a checkpoint: it has lost its name before its first file goes."""
    gone = path.with_name(_GONE + path.name)
    with writing(path):
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
        shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Removes what killed runs have left unfinished."""
    for path in folder.iterdir():
        if path.name.startswith((_PARTIAL, _GONE)):
            with writing(path):
                shutil.rmtree(path)


def thin(folder: Path, keep: int | None) -> None:
    """Removes the oldest checkpoints, down to `keep`; None keeps all."""
    if keep is not None:
        for old in saved(folder)[:-keep]:
            remove(old.path)


def resolve(path: "str | os.PathLike[str]", what: str) -> Path:
    """The folder of one checkpoint: `path` itself, or the newest in the folder of a run.

    Raises: `ValueError` if there is none.
    """
    folder = Path(path)
    if (folder / COMPLETE).exists() or (folder / MANIFEST).exists():
        return folder
    found = saved(folder)
    if not found:
        there = "no such folder" if not folder.exists() else "no folder" if not folder.is_dir() else "a folder of none"
        raise ValueError(
            f"{what}: {folder}: got {there}; want a complete checkpoint, or the folder of a run with one; look for "
            f"{COMPLETE} in its folders"
        )
    return found[-1].path
