"""Checkpointer: the checkpoints of one run.

Comes in: a folder, states now and then. Goes out: the last K checkpoints, each written by a thread while training goes
on, and the newest complete one after a crash. What is not complete has no name, so it is never read.
"""

import atexit
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ._errors import DamagedError
from ._files import COMPLETE, MANIFEST
from ._folder import absolute, next_name, partial, publish, saved, sweep, thin, unmarked
from ._processes import Event
from ._restore import Restored, read_state, together
from ._save import make_empty
from ._snapshot import HostMemory, snapshot
from ._write import write


class Checkpointer:
    """Saves while training goes on, keeps the last few checkpoints, and finds the newest complete one.

        with vs.checkpoint.Checkpointer("runs/a", keep=3) as checkpointer:
            found = checkpointer.restore(state)  # None in an empty folder
            ...
            checkpointer.save(state, extra={"position": i})

    All processes of a job make one with equal arguments and call it alike. One job at a time may use a folder.

    Arguments:

    - `folder`: of the run; made if it does not exist. All processes see it.
    - `keep`: complete checkpoints to keep; older ones are removed after a save. None: all.
    - `timeout`: seconds to wait for other processes, at most.

    Raises: `ValueError` for a `keep` or `timeout` that is not positive, and for an address that is no path; `save` and
    `restore` raise it for the folder of a single checkpoint.
    """

    def __init__(self, folder: "str | os.PathLike[str]", *, keep: int | None = 3, timeout: float = 600.0) -> None:
        if keep is not None and not keep >= 1:
            raise ValueError(f"Checkpointer: keep: got {keep}; want at least 1; pass None to keep all")
        if not timeout > 0:
            raise ValueError(f"Checkpointer: timeout: got {timeout}; want a positive number of seconds; pass 600")
        self.folder = absolute(folder, "Checkpointer")
        self.keep = keep
        self.timeout = timeout
        self._memory = HostMemory()
        self._writer: _Writer | None = None
        self._swept = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, in the order in which they were saved."""
        return tuple(item.step for item in saved(self.folder))

    @property
    def latest(self) -> Path | None:
        """The folder of the newest complete checkpoint; None if there is none."""
        found = saved(self.folder)
        return found[-1].path if found else None

    def save(self, state: Any, extra: Any = None, *, wait: bool = False) -> Path:
        """Saves a state. It may be donated as soon as this returns: what is written is a copy in host memory.

        Waits for the save before, if that is still being written.

        Arguments:

        - `state`: a `TrainState` or a `Sharded` model, with values.
        - `extra`: see `save`.
        - `wait`: whether to return only when the checkpoint is complete; nothing is copied then.

        Returns: the folder that the checkpoint will have.

        Raises: what the thread of the save before raised; `TypeError` or `ValueError` for what cannot be saved.
        """
        self.wait()
        event = Event.begin(self.timeout)
        taken = snapshot(state, extra, "Checkpointer.save", None if wait else self._memory)
        final = self.folder / event.decide("name", lambda: self._prepare(taken.manifest.step))
        keep, folder = self.keep, self.folder

        def publish_and_thin() -> None:
            publish(final)
            thin(folder, keep)

        self._writer = _Writer(lambda: write(taken, partial(final), event, publish_and_thin), final)
        if wait:
            self.wait()
        return final

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises: what its thread raised.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.finish()

    def restore(self, state: Any, *, step: int | None = None, reset: Sequence[str] = ()) -> Restored | None:
        """Restores the newest complete checkpoint.

        If that is damaged, a warning says so and the one before is taken.

        Arguments:

        - `state`, `reset`: see `restore`.
        - `step`: of the checkpoint, if it shall not be the newest; nothing else is taken then.

        Returns: see `Restored`; None if the folder holds no complete checkpoint and no step was asked for.

        Raises: `ValueError` that lists everything in which state and checkpoint differ, or if there is no checkpoint of
        that step; `DamagedError` if no complete checkpoint is whole.
        """
        self.wait()
        event = Event.begin(self.timeout)
        names = event.decide("names", lambda: self._candidates(step))
        for i, name in enumerate(names):
            try:
                return together(event, f"restored/{i}", functools.partial(read_state, self.folder / name, state, reset))
            except DamagedError as damage:
                if i + 1 == len(names):
                    raise
                warnings.warn(f"{damage} -- going back to {names[i + 1]}", stacklevel=2)
        return None

    def close(self) -> None:
        """Waits for the last save; see `wait`."""
        self.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as mistake:
            if error is None:
                raise
            error.add_note(f"The last save failed, too: {mistake}")

    def _prepare(self, step: int) -> str:
        """Makes the folder that is written to, in process 0; returns its final name."""
        self._check_folder("save")
        if not self.folder.is_dir():
            make_empty(self.folder)
        if not self._swept:
            sweep(self.folder)
            self._swept = True
        name = next_name(self.folder, step)
        make_empty(partial(self.folder / name))
        return name

    def _check_folder(self, what: str) -> None:
        """Refuses the folder of one checkpoint, in which a run would look for its own in vain and start anew."""
        if (self.folder / COMPLETE).exists() or (self.folder / MANIFEST).exists():
            raise ValueError(
                f"Checkpointer.{what}: {self.folder}: got a checkpoint; want the folder of a run; pass "
                f"{str(self.folder.parent)!r} and restore(state, step=...), or use vs.checkpoint.restore for this one"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"Checkpointer.{what}: {self.folder}: got a file; want a folder; choose another path")

    def _candidates(self, step: int | None) -> list[str]:
        """Names of the checkpoints that will do, the first choice first."""
        self._check_folder("restore")
        if step is None and (lost := unmarked(self.folder)):
            warnings.warn(
                f"Checkpointer.restore: {self.folder}: got {', '.join(path.name for path in lost)} without {COMPLETE}; "
                "want the marker that is written last; copy them again from where they are whole -- going back to what "
                "is complete",
                stacklevel=5,
            )
        found = [item for item in saved(self.folder) if step in (None, item.step)]
        if step is not None and not found:
            raise ValueError(
                f"Checkpointer.restore: got step {step}; want one of {list(self.steps)}, those in {self.folder}; pass "
                "step=None for the newest"
            )
        names = [item.path.name for item in reversed(found)]
        return names if step is None else names[:1]


class _Writer:
    """A save that is being written by a thread; the interpreter waits for it at its end."""

    def __init__(self, write: Callable[[], None], path: Path) -> None:
        self._error: BaseException | None = None
        self._write = write
        self._path = path
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        # A program that ends without wait() or close() shall hear of it, too.
        atexit.register(self._at_exit)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Waits, and raises what went wrong."""
        self._thread.join()
        atexit.unregister(self._at_exit)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _at_exit(self) -> None:
        self._thread.join()
        if self._error is not None:
            sys.stderr.write(f"Checkpointer: {self._path} was not written: {self._error}\n")
