"""Job: the processes of one training job on this machine, started, watched and ended together.

Comes in: a command and how many processes run it. Goes out: an exit status, and a message that names the process that
ended the job. Process 0 writes to the terminal itself; the lines of the others carry their number.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from ._hosts import ADDRESS, COUNT, INDEX, LAUNCHER, TIMEOUT
from ._watch import STATUS

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for the others, once a process has failed."""

SIGNAL_GRACE = 30.0
"""Seconds that processes have to end after a signal that was passed on to them."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CAUSE_SECONDS = 4.0
_LAST_LINES = 20
_POLL = 0.05


def environment_of(
    process: int, processes: int, port: int, devices: int | None, timeout: float, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process.

    Arguments:

    - `process`, `processes`: which of how many.
    - `port`: of process 0's coordinator.
    - `devices`: of each process; None: as many as JAX finds.
    - `timeout`: see `join_hosts`.
    - `inherited`: the environment of the launcher.
    """
    address = f"127.0.0.1:{port}"
    told = {
        ADDRESS: address,
        # JAX would listen on all interfaces.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        COUNT: str(processes),
        INDEX: str(process),
        LAUNCHER: str(os.getpid()),
        TIMEOUT: f"{timeout:g}",
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        # The first counts for virtual devices on the CPU, the second for GPUs.
        told["JAX_NUM_CPU_DEVICES"] = str(devices)
        told["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(process * devices + k) for k in range(devices))
    return {**inherited, **told}


@dataclass(eq=False)
class Member:
    """One process of a job.

    Attributes:

    - `number`: from 0.
    - `popen`: the process.
    - `errors`: its last lines on stderr.
    - `stopped`: the signal that stopped it, if it is stopped.
    - `since`: the moment at which it was stopped.
    """

    number: int
    popen: "subprocess.Popen[bytes]"
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    readers: list[threading.Thread] = field(default_factory=list)
    stopped: int | None = None
    since: float = 0.0

    @property
    def fate(self) -> str:
        """How it ended, or what it is doing, for people."""
        code = self.popen.poll()
        if code is None:
            return f"was stopped by {_signal_name(self.stopped)}" if self.stopped else "was still running"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"

    @property
    def status(self) -> int:
        """Its exit status as a shell gives it."""
        code = self.popen.returncode or 0
        return 128 - code if code < 0 else code

    def look(self) -> None:
        """Notes whether it was stopped or goes on."""
        try:
            news = os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return
        if news is not None and news.si_pid:
            self.stopped = news.si_status if news.si_code == os.CLD_STOPPED else None
            self.since = time.monotonic()

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)


def run_job(command: Sequence[str], processes: int, devices: int | None, timeout: float) -> int:
    """Runs a command in several processes and waits for them.

    Arguments:

    - `command`: program and arguments, the same for all.
    - `processes`, `devices`, `timeout`: see `environment_of`.

    Returns: 0 if all ended well, else the status of the process that failed first: 128 and the signal if one ended it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    received: list[int] = []
    earlier = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _FORWARDED}
    members: list[Member] = []
    try:
        for k in range(processes):
            told = environment_of(k, processes, port, devices, timeout, os.environ)
            members.append(_start(k, command, told))
        return _wait(members, received, timeout)
    finally:
        for member in members:
            member.send(signal.SIGKILL)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _start(number: int, command: Sequence[str], environment: dict[str, str]) -> Member:
    # A session of its own: a signal of the terminal comes once, through the launcher.
    popen = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if number == 0 else subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    member = Member(number, popen)
    prefix = f"[{number}] " if number else ""
    for source, target, last in ((popen.stdout, sys.stdout, None), (popen.stderr, sys.stderr, member.errors)):
        if source is not None:
            reader = threading.Thread(target=_pass_on, args=(source, target, prefix, last), daemon=True)
            reader.start()
            member.readers.append(reader)
    return member


def _pass_on(source: IO[bytes], target: Any, prefix: str, last: "deque[str] | None") -> None:
    """Passes lines on to the terminal, and keeps the last ones."""
    for raw in source:
        text = raw.decode(errors="replace")
        if last is not None:
            last.append(text.rstrip("\n"))
        target.write(prefix + text)
        target.flush()


def _wait(members: Sequence[Member], received: list[int], timeout: float) -> int:
    """Waits until all have ended or one has failed, passing signals on."""
    deadline, ending = float("inf"), 0
    while True:
        while received:
            number = received.pop(0)
            if ending and number in _ENDING:
                deadline = 0.0
            for member in members:
                member.send(number)
            if number in _ENDING and not ending:
                ending, deadline = number, time.monotonic() + SIGNAL_GRACE
        for member in members:
            member.look()
        codes = [member.popen.poll() for member in members]
        if ending and (time.monotonic() > deadline or None not in codes):
            _end(members, 0.0)
            _say(f"ended by {_signal_name(ending)}")
            return 128 + ending
        if ending and any(codes):
            # It may have ended by the signal; the others would wait for it.
            _end(members, GRACE)
            _say(f"ended by {_signal_name(ending)}")
            return 128 + ending
        still = any(member.stopped and time.monotonic() - member.since > timeout for member in members)
        if any(codes) or still:
            return _report(members)
        if None not in codes:
            _end(members, 0.0)
            return 0
        time.sleep(_POLL)


def _report(members: Sequence[Member]) -> int:
    """Ends the rest and says who ended the job."""
    causes = _causes(members)
    fates = {member.number: member.fate for member in members}
    failed = [member for member in members if member.popen.poll()]
    _end(members, GRACE)
    for cause in causes:
        _say(f"process {cause.number} (pid {cause.popen.pid}) {fates[cause.number]}; it ends the job")
    for member in [cause for cause in causes if cause in failed] or failed[:1]:
        if member.errors:
            _say(f"last lines of process {member.number} on stderr:")
            sys.stderr.writelines(f"  | {text}\n" for text in member.errors)
    sys.stderr.flush()
    return next((member.status for member in (*causes, *failed) if member in failed), 1)


def _causes(members: Sequence[Member]) -> list[Member]:
    """The processes that ended the job.

    One that its watch or JAX has ended is a victim, unless nothing better is found: the others may fail within moments,
    and process 0 waits until all know of its failure.
    """
    deadline = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < deadline:
        stopped = [member for member in members if member.popen.poll() is None and member.stopped]
        failed = [member for member in members if member.popen.poll()]
        causes = [member for member in failed if member.popen.returncode not in (STATUS, -signal.SIGABRT)]
        if causes or stopped or len(failed) == len(members):
            return causes or stopped or failed[:1]
        time.sleep(_POLL)
    return [member for member in members if member.popen.poll()][:1]


def _end(members: Sequence[Member], grace: float) -> None:
    """Ends all that still run, gently at first, and reads their output to the end."""
    deadline = time.monotonic() + grace
    for member in members:
        member.send(signal.SIGTERM if grace else signal.SIGKILL)
    while any(m.popen.poll() is None and not m.stopped for m in members) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for member in members:
        member.send(signal.SIGKILL)
        member.popen.wait()
        for reader in member.readers:
            # A grandchild may hold the pipe open.
            reader.join(1.0)


def _signal_name(number: int | None) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _say(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")
    sys.stderr.flush()
