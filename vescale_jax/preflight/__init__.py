"""Preflight: a training step compiled for chips that are not there, and what the compiled program will do.

In comes a `Workload` (a step and its shapes); out goes a `Report`: bytes of a device by kind, collectives and whether
they are hidden, copies, estimated time. `python -m vescale_jax preflight` is the same as a command;
`docs/preflight.md` says what the numbers mean.
"""

from ._chip import CHIPS as CHIPS
from ._chip import Chip as Chip
from ._chip import chip as chip
from ._cost import Rates as Rates
from ._report import Report as Report
from ._report import examine as examine
from ._report import preflight as preflight
from ._topology import devices as devices
from ._topology import devices_per_node as devices_per_node
from ._workload import Workload as Workload
