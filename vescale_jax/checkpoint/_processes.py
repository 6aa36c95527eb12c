"""Processes: what the processes of one job tell each other while they save and restore.

Comes in: small texts. Goes out: the same text on every process, or an error that names the process which did not
answer in time. It goes through the service that `jax.distributed` runs, never through the devices, so it may be used
from a thread while a step is running. With one process nothing is sent.
"""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

# All processes save and restore alike and in the same order, so equal numbers mean the same event.
_EVENTS = itertools.count()


@dataclass(frozen=True, slots=True)
class Event:
    """One save or restore, on all processes.

    Attributes:

    - `index`, `count`: this process, and how many there are.
    - `timeout`: seconds to wait for the others, at most.
    - `number`: of the event.
    """

    index: int
    count: int
    timeout: float
    number: int

    @classmethod
    def begin(cls, timeout: float) -> "Event":
        """The next event; every process has to come here."""
        return cls(jax.process_index(), jax.process_count(), timeout, next(_EVENTS))

    def decide(self, topic: str, choose: Callable[[], Any]) -> Any:
        """What process 0 chooses, on every process.

        Arguments:

        - `topic`: unique within the event.
        - `choose`: called on process 0; returns something for JSON. What it raises is raised on every process.
        """
        if self.count == 1:
            return choose()
        if self.index == 0:
            try:
                chosen = choose()
            except Exception as error:
                self._tell(topic, {"error": str(error)})
                raise
            self._tell(topic, {"value": chosen})
            return chosen
        answer = self._ask(topic, 0)
        if "error" in answer:
            raise RuntimeError(f"checkpoint: process 0: {answer['error']}")
        return answer["value"]

    def agree(self, topic: str, error: Exception | None) -> dict[int, str]:
        """The errors of all processes, by process; empty if all went well. Returns once all have come here.

        Arguments:

        - `topic`: unique within the event.
        - `error`: what went wrong in this process.
        """
        mine = None if error is None else f"{type(error).__name__}: {error}"
        if self.count == 1:
            return {} if mine is None else {0: mine}
        self._tell(f"{topic}/{self.index}", {"error": mine})

        def collect() -> dict[str, str]:
            end = time.monotonic() + self.timeout
            answers = {k: self._ask(f"{topic}/{k}", k, end - time.monotonic())["error"] for k in range(self.count)}
            return {str(k): text for k, text in answers.items() if text is not None}

        return {int(k): text for k, text in self.decide(f"{topic}/all", collect).items()}

    def _tell(self, topic: str, message: Any) -> None:
        _client().key_value_set(self._key(topic), json.dumps(message))

    def _ask(self, topic: str, process: int, limit: float | None = None) -> Any:
        # Process 0 may come as late as the time-out allows and wait as long again: the others hear then whom it missed.
        limit = 2 * self.timeout + 10 if limit is None else limit
        try:
            return json.loads(_client().blocking_key_value_get(self._key(topic), max(1, int(1000 * limit))))
        except Exception as error:
            if "DEADLINE" not in str(error).upper():
                raise
            raise TimeoutError(
                f"checkpoint: process {process} of {self.count}: got no answer within {limit:.0f} s; want one; see "
                "whether it still runs, or pass a larger timeout"
            ) from error

    def _key(self, topic: str) -> str:
        return f"vescale_jax/checkpoint/{self.number}/{topic}"


def _client() -> Any:
    # JAX has no public name for the client of its service; orbax takes it from here, too.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            f"checkpoint: got {jax.process_count()} processes without a coordination service; want one; call "
            "jax.distributed.initialize() before anything else"
        )
    return client
