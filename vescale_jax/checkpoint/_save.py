"""save: one checkpoint, now.

Comes in: a state and a folder that does not exist. Goes out: the folder, complete. `Checkpointer` is for the
checkpoints of a run, which are written while training goes on.
"""

import os
from pathlib import Path
from typing import Any

from ._folder import absolute, partial, publish
from ._processes import Event
from ._snapshot import snapshot
from ._write import write


def save(path: "str | os.PathLike[str]", state: Any, extra: Any = None, *, timeout: float = 600.0) -> Path:
    """Writes a checkpoint and returns when it is complete and on the disk; every process has to call it.

    Arguments:

    - `path`: a folder that does not exist yet; all processes see it.
    - `state`: a `TrainState` or a `Sharded` model, with values.
    - `extra`: a small tree of yours: dicts with string keys, lists, numbers, strings, None, and arrays that every
      process has whole. Process 0's is kept.
    - `timeout`: seconds to wait for other processes, at most.

    Returns: the folder.

    Raises: `ValueError` if the folder exists, `OSError` that names the file which could not be written.
    """
    event = Event.begin(timeout)
    taken = snapshot(state, extra, "save", None)

    def prepare() -> str:
        final = absolute(path, "save")
        if final.exists():
            raise ValueError(f"save: {final}: got a path that exists; want a new one; remove it or choose another")
        make_empty(partial(final))
        return str(final)

    final = Path(event.decide("path", prepare))
    write(taken, partial(final), event, lambda: publish(final))
    return final


def make_empty(folder: Path) -> None:
    """Makes a folder without anything in it.

    Raises: `OSError` that names it.
    """
    import shutil

    from ._files import writing

    with writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
