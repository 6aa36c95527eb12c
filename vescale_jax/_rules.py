"""Rules: one value for all names, one by pattern, or one by function.

Many arguments of `fully_shard` mean "this value for these parameters": blocks, trainability, resharding. All of them
take a rule, and all of them resolve it here, so that they agree on patterns and on complaints.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

from vescale_planner import Faults

T = TypeVar("T")

Rule: TypeAlias = T | Mapping[str, T] | Callable[..., T]
"""A value for every name; or a mapping of patterns such as `"layers/*/kernel"` to values, of which the first that
matches counts; or a function of the name (and, where it is said, of more) that returns the value."""


def resolve(
    rule: Any, names: Mapping[str, tuple[Any, ...]] | Iterable[str], *, argument: str, default: Any, faults: Faults
) -> dict[str, Any]:
    """Applies a rule to names.

    Arguments:

    - `rule`: see `Rule`.
    - `names`: the names, each with what a function is given beside it.
    - `argument`: the public name of the argument, for messages.
    - `default`: for names that no pattern matches.
    - `faults`: takes a fault for every pattern that matches nothing.

    Returns: the value for every name, in the order of `names`.
    """
    extras = names if isinstance(names, Mapping) else dict.fromkeys(names, ())
    if callable(rule) and not isinstance(rule, type):
        return {name: rule(name, *extra) for name, extra in extras.items()}
    if not isinstance(rule, Mapping):
        return dict.fromkeys(extras, rule)
    used: set[str] = set()
    found: dict[str, Any] = {}
    for name in extras:
        matching = [pattern for pattern in rule if fnmatchcase(name, pattern)]
        used.update(matching)
        found[name] = rule[matching[0]] if matching else default
    for pattern in rule:
        if pattern not in used:
            nothing_matches(faults, argument, pattern, extras)
    return found


def nothing_matches(faults: Faults, argument: str, pattern: str, names: Iterable[str]) -> None:
    """Notes that a pattern matches none of the names."""
    some = list(names)
    nearest = list(dict.fromkeys([*difflib.get_close_matches(pattern, some, 3), *some]))[:3]
    examples = ", ".join(name for name in some if name in nearest) + (", ..." if len(some) > 3 else "")
    faults.add(
        argument,
        got=f"pattern {pattern!r}, which matches nothing",
        want=f"patterns that match names such as {examples}",
        change="mend or drop it",
    )
