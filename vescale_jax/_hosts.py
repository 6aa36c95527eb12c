"""Hosts: one training job on several processes, on one machine or many.

Comes in: what the environment says about the job: `python -m vescale_jax launch`, SLURM, Open MPI, Kubernetes or a TPU
pod. Goes out: which process this is, after it has joined the others through `jax.distributed`, with time-outs that
end the whole job when one process dies or sticks.

Three variables describe a job where no scheduler does: `JAX_COORDINATOR_ADDRESS` (host and port of process 0),
`JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. JAX reads the first of them itself.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ._watch import STATUS, Watch, joined

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LAUNCHER, TIMEOUT = "VESCALE_JAX_LAUNCHER", "VESCALE_JAX_TIMEOUT"
"""What `launch` tells beside these three: its own process id, and the seconds of `--timeout`."""

DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True, eq=False)
class Hosts:
    """This process among those of the job; made by `join_hosts`.

    Attributes:

    - `process`: the number of this process, from 0.
    - `processes`: how many there are.
    """

    process: int
    processes: int
    _watch: Watch | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is process 0: the one that prints and draws."""
        return self.process == 0

    def progress(self, step: int) -> None:
        """Tells the others that this process has finished a step: its results are there, not only asked for.

        With `step_timeout` the job ends if a process takes longer from one call to the next, unless it called `pause`.

        Arguments:

        - `step`: how far it is.
        """
        if self._watch is not None:
            self._watch.progress(step)

    def pause(self) -> None:
        """Suspends `step_timeout` for this process until it calls `progress` again.

        For what takes its time between two steps, and after the last one. All processes have to call it, since the
        others wait for the one that is slow.
        """
        if self._watch is not None:
            self._watch.pause()


def join_hosts(
    *,
    cluster: str | None = None,
    timeout: float | None = None,
    step_timeout: float | None = None,
    join_timeout: float = 300,
    leave_timeout: float = 300,
) -> Hosts:
    """Joins the other processes of the job; to be called first, before anything that uses a device.

    It does nothing where there is one process only. After it, `jax.devices()` are those of all processes. A thread of
    each process tells the others that it is alive; if one is silent, fails or sticks, all end with a message on stderr
    that names it, and exit status 70. An exception that nothing catches ends all of them as well.

    Arguments:

    - `cluster`: how JAX is to find the others, by its own names: `"slurm"`, `"tpu"`, `"mpi4py"`, ... None: by the
      environment.
    - `timeout`: seconds for which a process may be silent: dead, stopped, or cut off. The job ends at most 10 s later.
      None: what `launch --timeout` says, or else 60.
    - `step_timeout`: seconds from one call of `Hosts.progress` to the next after which a process counts as stuck,
      though it is alive. None: no limit.
    - `join_timeout`: seconds to wait for all processes at the start; then the process ends, with a message.
    - `leave_timeout`: seconds for which the first process to end waits for the last one.

    Returns: which process this is.

    Raises: `ValueError` for a time-out that is not positive, for an environment that describes half a job, or one that
    JAX cannot read; `RuntimeError` if a device was used before.
    """
    environment = dict(os.environ)
    limits = {"step_timeout": step_timeout, "join_timeout": join_timeout, "leave_timeout": leave_timeout}
    for name, seconds in {"timeout": timeout, **limits}.items():
        if seconds is not None and not seconds > 0:
            raise ValueError(f"join_hosts: {name}: got {seconds}; want a positive number of seconds; pass such a one")
    job = _job(environment, cluster)
    if job is None:
        return Hosts(0, 1)
    silence = float(timeout or environment.get(TIMEOUT) or DEFAULT_TIMEOUT)
    _initialize(job, cluster, silence, join_timeout, leave_timeout)
    process, processes = joined().process_id, joined().num_processes
    if processes == 1:
        return Hosts(0, 1)
    launcher = environment.get(LAUNCHER)
    watch = Watch(process, processes, silence, step_timeout, int(launcher) if launcher else None)
    watch.start()
    return Hosts(process, processes, watch)


def _job(environment: Mapping[str, str], cluster: str | None) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` has to be told; None for a process alone.

    Raises: `ValueError` if the variables describe half a job.
    """
    address, count, index = (environment.get(name) for name in (ADDRESS, COUNT, INDEX))
    scheduled = cluster is not None or _is_scheduled(environment)
    if not scheduled and address is None and count is None and index is None:
        return None
    if not scheduled and None in (address, count, index):
        given = ", ".join(f"{name}={environment[name]}" for name in (ADDRESS, COUNT, INDEX) if name in environment)
        raise ValueError(
            f"join_hosts: got {given} alone; want {ADDRESS} (host:port of process 0), {COUNT} and {INDEX}, all three, "
            "or a scheduler that JAX knows; set the missing ones, or none"
        )
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ValueError(f"join_hosts: {ADDRESS}: got {address!r}; want host:port; name the port of process 0, too")
    for name, text in ((COUNT, count), (INDEX, index)):
        if text is not None and not text.isdigit():
            raise ValueError(f"join_hosts: {name}: got {text!r}; want a number; mend the variable")
    if count is not None and int(count) == 1:
        return None
    if count is not None and index is not None and int(index) >= int(count):
        raise ValueError(f"join_hosts: {INDEX}: got {index} of {count}; want 0 to {int(count) - 1}; mend the variables")
    return {
        "coordinator_address": address,
        "num_processes": None if count is None else int(count),
        "process_id": None if index is None else int(index),
    }


def _is_scheduled(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler that JAX knows has started this process as one of several."""

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else 0

    # A SLURM batch script outside srun has the first variable and not the second, and is alone.
    slurm = number("SLURM_NTASKS") > 1 and "SLURM_STEP_NODELIST" in environment
    mpi = number("OMPI_COMM_WORLD_SIZE") > 1
    kubernetes = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    # JAX sets the last one on a machine that has TPUs and their library; a pod is then known by its metadata.
    tpu = "," in environment.get("TPU_WORKER_HOSTNAMES", "") or environment.get("TPU_ML_PLATFORM") == "JAX"
    return slurm or mpi or kubernetes or tpu


def _initialize(job: dict[str, Any], cluster: str | None, silence: float, join: float, leave: float) -> None:
    complete = None not in job.values()
    # JAX would abort the process, and say nothing of what was missing.
    late = threading.Timer(join, _give_up, (job, join))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            **job,
            cluster_detection_method="deactivate" if complete and cluster is None else cluster,
            initialization_timeout=_seconds(join + 10),
            # The watch speaks first, since its message is the clearer one; this is for when it cannot.
            heartbeat_timeout_seconds=_seconds(1.5 * silence + 10),
            shutdown_timeout_seconds=_seconds(leave),
        )
    except ValueError as mistake:
        raise ValueError(
            f"join_hosts: JAX found no job here ({mistake}); want one started by a scheduler that JAX knows, or the "
            f"variables {ADDRESS}, {COUNT} and {INDEX}; set them, or name the scheduler by cluster=..."
        ) from mistake
    finally:
        late.cancel()


def _give_up(job: dict[str, Any], join: float) -> None:
    """Ends a process that has waited in vain for the others."""
    who = "this process" if job["process_id"] is None else f"process {job['process_id']} of {job['num_processes']}"
    where = f" at {job['coordinator_address']}" if job["coordinator_address"] else ""
    os.write(
        2,
        f"vescale_jax: {who} has waited {join:g} s for the others{where}: not all were started, or they cannot reach "
        f"process 0 there, or join_timeout is too short\n".encode(),
    )
    os._exit(STATUS)


def _seconds(seconds: float) -> int:
    return max(1, round(seconds))
