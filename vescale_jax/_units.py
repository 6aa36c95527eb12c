"""Units: which parameters are gathered together.

Comes in: parameters by path with their bytes, and the user's rule. Goes out: unit names with their parameters, in
natural order. A unit is FSDP2's parameter group and the paper's bucket: one all-gather, one reduce-scatter.

Without a rule, every layer of a list of layers is a unit and what is left is the unit `root`. A list of layers is a
numbered path component with something below it: `layers/0/kernel` (nnx lists, tuples and lists in a pytree), or linen's
`Block_0/Dense_0/kernel`, where siblings share a name and a module lies between the number and the parameter.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from typing import TypeAlias

from vescale_planner import Faults

from ._rules import nothing_matches

ROOT = "root"

UnitRule: TypeAlias = Sequence[str] | Callable[[str], str | None] | None
"""None: one unit a layer. Patterns such as `("encoder/layers/*", "embed")`: one unit for every path prefix that a
pattern matches, the longest pattern first. A function: path to unit name, None for the root unit."""


def stacked(paths: Sequence[str], stacks: Sequence[str], faults: Faults) -> dict[str, list[str]]:
    """The units that are stacks of layers.

    Arguments:

    - `paths`: of all parameters.
    - `stacks`: patterns; every path prefix that one matches is a stack.
    - `faults`: takes what is wrong with the patterns.

    Returns: unit names with their parameters' paths.
    """
    units: dict[str, list[str]] = defaultdict(list)
    for path, owner in _prefixes(sorted(paths, key=natural), stacks, "stacks", faults).items():
        if owner is not None:
            units[owner].append(path)
    return dict(units)


def assign(paths: Mapping[str, int], rule: UnitRule, max_bytes: int | None, faults: Faults) -> dict[str, list[str]]:
    """Sorts parameters into units.

    Arguments:

    - `paths`: parameter paths with the bytes of each when gathered.
    - `rule`: see `UnitRule`.
    - `max_bytes`: cap on the gathered bytes of a unit. Units found without a rule are split until they obey or hold
      one parameter; units of the user's rule are refused. None: no cap.
    - `faults`: takes what is wrong with the rule.

    Returns: unit names with their parameters' paths, in natural order, root first.
    """
    if rule is None:
        owners = _layers(list(paths))
    elif callable(rule):
        owners = {path: rule(path) for path in paths}
        for path, owner in owners.items():
            if owner is not None and not isinstance(owner, str):
                got = f"{owner!r} for {path}"
                faults.add("units", got=got, want="a unit name or None", change="return a string")
        faults.raise_if_any(TypeError)
        if paths and all(owner is None for owner in owners.values()):
            some = ", ".join(list(paths)[:3])
            want = "a unit name for at least one parameter"
            change = f"compare it with paths such as {some}"
            faults.add("units", got="a function that returns None for every parameter", want=want, change=change)
    else:
        owners = _prefixes(list(paths), rule, "units", faults)
    units: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths, key=natural):
        units[owners[path] or ROOT].append(path)
    if max_bytes is not None:
        if rule is None:
            units = _split(units, paths, max_bytes)
        else:
            _refuse(units, paths, max_bytes, faults)
    return in_order(units)


def in_order(units: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Units in natural order, root first."""
    return {name: units[name] for name in sorted(units, key=lambda name: (name != ROOT, natural(name)))}


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key under which `layers/2` comes before `layers/10`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _layers(paths: Sequence[str]) -> dict[str, str | None]:
    numbered: dict[str, set[str]] = defaultdict(set)
    found: dict[str, list[tuple[str, str]]] = {}
    for path in paths:
        parts = path.split("/")
        for i, part in enumerate(parts[:-1]):
            stem, _, number = part.rpartition("_")
            if part.isdigit():
                stem, number, below = "", part, 1
            else:
                below = 2
            if number.isdigit() and len(parts) - i > below:
                family = "/".join([*parts[:i], stem])
                numbered[family].add(number)
                found.setdefault(path, []).append((family, "/".join(parts[: i + 1])))
    owners: dict[str, str | None] = dict.fromkeys(paths)
    for path, candidates in found.items():
        for family, unit in candidates:
            # One `Block_0` alone is a module that linen numbered, not a list; a list of one layer is still a list.
            if family.endswith("/") or family == "" or len(numbered[family]) > 1:
                owners[path] = unit
                break
    return owners


def _prefixes(paths: Sequence[str], patterns: Sequence[str], argument: str, faults: Faults) -> dict[str, str | None]:
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        want = "None, a sequence of patterns, or a function from path to unit name"
        want = want if argument == "units" else "a sequence of patterns"
        faults.add(argument, got=repr(patterns), want=want, change="pass one of these")
        faults.raise_if_any(TypeError)
    if isinstance(patterns, str):
        faults.add(
            argument, got=f"the string {patterns!r}", want="a sequence of patterns", change=f"pass ({patterns!r},)"
        )
        patterns = (patterns,)
    owners: dict[str, str | None] = dict.fromkeys(paths)
    used: set[str] = set()
    for path in paths:
        parts = path.split("/")
        for pattern in sorted(patterns, key=lambda p: -p.count("/")):
            depth = pattern.count("/") + 1
            prefix = "/".join(parts[:depth])
            if len(parts) >= depth and fnmatchcase(prefix, pattern):
                used.add(pattern)
                owners[path] = owners[path] or prefix
    for pattern in patterns:
        if pattern not in used:
            nothing_matches(faults, argument, pattern, paths)
    return owners


def _split(units: Mapping[str, list[str]], size: Mapping[str, int], cap: int) -> dict[str, list[str]]:
    """Gives parameters above the cap a unit each and cuts what is left into runs below it."""
    out: dict[str, list[str]] = {}
    taken = {*units, *size}
    for name, paths in units.items():
        if sum(size[path] for path in paths) <= cap or len(paths) == 1:
            out[name] = paths
            continue
        runs: list[list[str]] = [[]]
        for path in paths:
            if size[path] > cap:
                out[path if path not in units else _free(path, taken)] = [path]
            elif sum(size[p] for p in runs[-1]) + size[path] > cap:
                runs.append([path])
            else:
                runs[-1].append(path)
        for i, run in enumerate(run for run in runs if run):
            out[name if i == 0 else _free(name, taken)] = run
    return out


def _free(name: str, taken: set[str]) -> str:
    """A numbered name that neither a unit nor a parameter has; it is taken afterwards."""
    number = next(i for i in count(1) if f"{name}.{i}" not in taken)
    taken.add(f"{name}.{number}")
    return f"{name}.{number}"


def _refuse(units: Mapping[str, list[str]], size: Mapping[str, int], cap: int, faults: Faults) -> None:
    for name, paths in units.items():
        total = sum(size[path] for path in paths)
        if total > cap and len(paths) > 1:
            largest = max(paths, key=lambda path: size[path])
            faults.add(
                f"unit {name}",
                got=f"{total} bytes in {len(paths)} parameters, the largest {largest} with {size[largest]} bytes",
                want=f"at most max_unit_bytes={cap}",
                change="cut the unit by a finer rule, or raise max_unit_bytes",
            )
