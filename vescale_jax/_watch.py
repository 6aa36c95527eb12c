"""Watch: a thread of each process that ends the job when one process dies, stops, fails or sticks.

Comes in: signs of life of all processes, through the key-value store of `jax.distributed`, which process 0 keeps. Goes
out: nothing, or a message and the end of the process.

A collective waits for its peers for ever, and JAX's own heartbeats go on while a program waits for data that never
come. So every process writes now and then how far it is and what its main thread is at. Process 0 reads all of it and
writes down a verdict; the others read that and watch process 0. A process costs two small requests a second.
"""

import atexit
import contextlib
import itertools
import json
import linecache
import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

STATUS = 70
"""Exit status of a process that the watch ends."""

_PREFIX = "vescale_jax/watch"
_INSIDE = (str(Path(jax.__file__).parent), str(Path(__file__).parent))
"""Folders of code in which a main thread waits for devices."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life.

    Attributes:

    - `count`: rises by one from sign to sign.
    - `host`, `pid`: where the process runs.
    - `step`: the last step that it has finished; None before the first.
    - `idle`: seconds since then.
    - `at`: file, line and expression that the main thread is at.
    - `waits`: whether that waits for devices, inside JAX.
    - `paused`: whether no step is to be expected of it.
    - `ended`: whether the process has come to its end.
    """

    count: int
    host: str
    pid: int
    step: int | None = None
    idle: float = 0.0
    at: str = ""
    waits: bool = False
    paused: bool = False
    ended: bool = False


def judge(
    signs: Mapping[int, Sign], silent: Mapping[int, float], timeout: float, step_timeout: float | None
) -> str | None:
    """What is wrong with a job, in a sentence that names the process; None if nothing is.

    Arguments:

    - `signs`: the last sign of each process, by number.
    - `silent`: seconds since it came.
    - `timeout`, `step_timeout`: see `join_hosts`.
    """
    dead = [k for k, sign in signs.items() if not sign.ended and silent[k] > timeout]
    if dead:
        names = ", ".join(name(k, signs[k]) for k in dead)
        return f"{names}: no sign of life for {timeout:g} s; dead, stopped, or cut off"
    if step_timeout is None:
        return None
    running = {k: sign for k, sign in signs.items() if not (sign.ended or sign.paused or sign.step is None)}
    if not any(sign.idle > step_timeout for sign in running.values()):
        return None
    table = "".join(f"\n{line(k, sign)}" for k, sign in sorted(signs.items()))
    gone = [k for k, sign in signs.items() if sign.ended]
    if gone:
        return f"{', '.join(name(k, signs[k]) for k in gone)}: ended while others wait for it{table}"
    late = [k for k in signs if silent[k] > timeout / 2]
    # The others wait in a collective for the one that is behind, or for the one that does not wait for anybody.
    first = min(sign.step or 0 for sign in running.values())
    behind = {k: sign for k, sign in running.items() if sign.step == first}
    guilty = late or [k for k, sign in behind.items() if not sign.waits] or list(behind)
    names = ", ".join(name(k, signs[k]) for k in guilty)
    return f"{names}: stuck, no step finished for {step_timeout:g} s{table}"


def name(process: int, sign: Sign) -> str:
    """A process for people."""
    return f"process {process} (pid {sign.pid} on {sign.host})" if sign.host else f"process {process}"


def line(process: int, sign: Sign) -> str:
    """How far a process is and what it is at."""
    if sign.ended:
        return f"  process {process}: ended after step {sign.step}"
    verb = "waits" if sign.waits else "is"
    return f"  process {process}: step {sign.step} done {sign.idle:.0f} s ago, {verb} at {sign.at}"


def whereabouts(frame: types.FrameType | None) -> tuple[str, bool]:
    """What a thread is at, outside of JAX and of this library, and whether it waits inside them.

    Arguments:

    - `frame`: its innermost frame.

    Returns: file, line, function and expression; whether it waits.
    """
    waits = frame is not None and frame.f_code.co_filename.startswith(_INSIDE)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return "an unknown place", waits
    code = frame.f_code
    place = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    first, last, start, stop = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if first is None or first != last:
        return place, waits
    expression = linecache.getline(code.co_filename, first).encode()[start:stop].decode(errors="replace")
    # A method of the C++ part of JAX, which has no frame.
    waits = waits or expression.endswith(".block_until_ready()")
    return f"{place}: {expression}" if expression else place, waits


def from_devices(error: BaseException) -> bool:
    """Whether an exception is the runtime's, by its type or by the status that its text begins with.

    A collective that another process has broken is such a one, and JAX raises it now as this type, now as that.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]{5,}: ", str(error)) is not None


class Watch:
    """The watch of one process.

    Arguments:

    - `process`, `processes`: which of how many this is.
    - `timeout`, `step_timeout`: see `join_hosts`.
    - `launcher`: the process without which this one is to end, by id; its parent.
    - `end`: what ends the process.
    """

    def __init__(
        self,
        process: int,
        processes: int,
        timeout: float,
        step_timeout: float | None,
        launcher: int | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.process, self.processes = process, processes
        self.timeout, self.step_timeout, self.launcher = timeout, step_timeout, launcher
        self.end = end
        self.interval = min(1.0, timeout / 5, (step_timeout or timeout) / 5)
        self.finished = threading.Event()
        self._counter = itertools.count(1)
        self._step: int | None = None
        self._paused = self._ended = False
        self._sign = Sign(0, socket.gethostname(), os.getpid())
        self._moved = time.monotonic()
        self._answered = time.monotonic()
        # One that never gives a sign is missed as well.
        expected = range(processes) if process == 0 else range(1)
        self._seen = {k: (Sign(0, "", 0), self._answered) for k in expected}
        self._verdict: str | None = None
        self._client = joined().client

    def start(self) -> None:
        """Starts the threads, and sees to it that the others learn of an exception or of the end of this process."""
        earlier = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            earlier(kind, error, trace)
            self.fail(error)

        sys.excepthook = failed
        atexit.register(self.leave)
        self._bounded(self._report)
        for work in (self._keep_reporting, self._keep_watching):
            threading.Thread(target=work, name=f"vescale_jax{work.__name__}", daemon=True).start()

    def progress(self, step: int) -> None:
        """Notes that a step is done."""
        self._moved = time.monotonic()
        self._step, self._paused = step, False

    def pause(self) -> None:
        """Notes that the next step may take its time."""
        self._paused = True

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process failed, and ends it."""
        if from_devices(error):
            # Most likely another process died and broke a collective: the watch is about to name it.
            self.finished.wait(self.timeout + 3 * self.interval)
        self.finished.set()
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        self._publish(f"{name(self.process, self._sign)}: failed with {summary}")
        self._end(1)

    def leave(self) -> None:
        """Tells the others that this process has come to its end."""
        self._ended = True
        # The last one to leave is process 0, whose store the others need; until then it watches them.
        if self.process != 0:
            self.finished.set()
        self._bounded(self._report)

    def _keep_reporting(self) -> None:
        """Reports again and again; blocks while process 0 does not answer."""
        while not self.finished.wait(self.interval):
            try:
                self._report()
                self._read()
            except jax.errors.JaxRuntimeError:
                continue
            self._answered = time.monotonic()

    def _report(self) -> None:
        """Writes a sign."""
        now = time.monotonic()
        # Documented by Python, in spite of its name.
        frames = sys._current_frames()  # noqa: SLF001
        at, waits = whereabouts(frames.get(threading.main_thread().ident or 0))
        sign = replace(
            self._sign,
            count=next(self._counter),
            step=self._step,
            idle=now - self._moved,
            at=at,
            waits=waits,
            paused=self._paused,
            ended=self._ended,
        )
        self._client.key_value_set(f"{_PREFIX}/signs/{self.process}", json.dumps(asdict(sign)), True)

    def _read(self) -> None:
        found = dict(self._client.key_value_dir_get(_PREFIX + "/verdict"))
        self._verdict = self._verdict or next(iter(found.values()), None)
        if self.process == 0:
            signs = self._client.key_value_dir_get(f"{_PREFIX}/signs/")
        else:
            signs = [(f"{_PREFIX}/signs/0", self._client.blocking_key_value_get(f"{_PREFIX}/signs/0", 1000))]
        now = time.monotonic()
        for key, text in signs:
            process, sign = int(key.rpartition("/")[2]), Sign(**json.loads(text))
            before = self._seen.get(process)
            if before is None or before[0].count != sign.count:
                self._seen[process] = (sign, now)

    def _keep_watching(self) -> None:
        last = time.monotonic()
        while not self.finished.wait(self.interval):
            now = time.monotonic()
            if now - last > 5 * self.interval:
                # This process itself was stopped; what it has not heard in the meantime means nothing.
                self._answered = now
                self._seen = {k: (sign, now) for k, (sign, _) in self._seen.items()}
            last = now
            fault = self._fault(now)
            if fault is not None:
                if self._verdict is None:
                    self._publish(fault)
                self._say(fault)
                return self._end(STATUS)
        return None

    def _fault(self, now: float) -> str | None:
        """What is wrong with the job, as far as this process can tell."""
        if self.launcher is not None and os.getppid() != self.launcher:
            return f"launch (pid {self.launcher}): gone"
        if self._verdict is not None:
            return self._verdict
        seen = dict(self._seen)
        if now - self._answered > self.timeout:
            return (
                f"{name(0, seen[0][0])}, the coordinator: no answer for {self.timeout:g} s; dead, stopped, or cut off"
            )
        signs = {k: sign for k, (sign, _) in seen.items()}
        silent = {k: now - since for k, (_, since) in seen.items()}
        # Only process 0 sees all, and so judges how far each one is.
        return judge(signs, silent, self.timeout, self.step_timeout if self.process == 0 else None)

    def _publish(self, verdict: str) -> None:
        self._verdict = verdict
        self._bounded(lambda: self._client.key_value_set(f"{_PREFIX}/verdict/{self.process}", verdict, True))

    def _bounded(self, action: Callable[[], Any]) -> None:
        """Does what may fail, and what may not hold up the end of the process."""

        def attempt() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError, OSError, ValueError):
                action()

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(2 * self.interval)

    def _say(self, fault: str) -> None:
        # Not through sys.stderr, whose lock the main thread may hold; and whoever read it may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f"vescale_jax: process {self.process} ends the job: {fault}\n".encode())

    def _end(self, status: int) -> None:
        self._bounded(sys.stdout.flush)
        if self.process == 0:
            # The store goes with process 0, and the others have to read it first.
            time.sleep(3 * self.interval)
        self.end(status)


def joined() -> Any:
    """What `jax.distributed` knows: `process_id`, `num_processes`, and `client`, that of the key-value store.

    JAX has no public name for the store; orbax takes it from the same place. And `jax.process_index` would start the
    devices, whose number a program may still want to set.
    """
    from jax._src import distributed

    return distributed.global_state
