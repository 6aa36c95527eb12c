"""Faults: every mistake of one request in one error.

A user who gave four wrong blocks wants to hear of four, not of one at a time. A function that checks many things
collects them here and raises once, before anything is made.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """Collects the faults of one request and raises them together.

    Arguments:

    - `what`: the public name of the function that checks, such as `"fully_shard"`; it opens the message.
    """

    what: str
    _lines: list[str] = field(default_factory=list[str])

    def add(self, path: str, *, got: str, want: str, change: str) -> None:
        """Notes one fault.

        Arguments:

        - `path`: the parameter, unit or argument at fault, such as `"layers/0/attention/query/kernel"`.
        - `got`: what was given.
        - `want`: what is acceptable.
        - `change`: what the caller should change, as an imperative.
        """
        self._lines.append(f"{path}: got {got}; want {want}; {change}")

    def absorb(self, error: Exception) -> None:
        """Takes over the lines of an error that other `Faults` raised, or its text as one line."""
        head, *lines = str(error).split("\n  ")
        self._lines.extend(lines or [head])

    def __bool__(self) -> bool:
        return bool(self._lines)

    def raise_if_any(self, error: type[Exception] = ValueError) -> None:
        """Raises `error` with one line a fault, in the order in which they were added; does nothing without faults."""
        if self._lines:
            count = "1 fault" if len(self._lines) == 1 else f"{len(self._lines)} faults"
            raise error("\n  ".join([f"{self.what}: {count}", *self._lines]))
