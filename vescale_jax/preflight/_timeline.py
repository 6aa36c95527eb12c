"""Timeline: the schedule of a compiled program, walked in order with the cost model's times.

In comes a `Program` and `Rates`; out goes a `Timeline`. Kernels run one after another. An asynchronous collective is
handed to the links when it is started, and the kernels wait at its end if it is not there yet; a synchronous one is
waited for at once. The links serve one collective after another, so two in flight share the bandwidth. What of a
collective no kernel waits for is hidden.

A loop is walked twice; its other turns are taken to be like the second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._collective import Collective, as_collective
from ._cost import Rates
from ._fusion import FREE, Kernels
from ._text import Computation, Instruction, Program, scheduled_calls


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time.

    Attributes:

    - `name`: of the instruction.
    - `kind`: `product`, `kernel`, `wait`, or the kind of a collective.
    - `begin`, `end`: seconds from the start of the step.
    - `turns`: how many times it stands for.
    - `in_loop`: whether it is in a loop.
    """

    name: str
    kind: str
    begin: float
    end: float
    turns: int
    in_loop: bool


@dataclass
class Sending:
    """One collective on its way.

    Attributes:

    - `collective`: what is sent.
    - `backward`: whether it belongs to the backward pass.
    - `begin`, `end`: when the links serve it.
    - `turns`, `in_loop`: as those of an `Event`.
    - `waited`: seconds in which kernels waited for it.
    """

    collective: Collective
    backward: bool
    begin: float
    end: float
    turns: int
    in_loop: bool
    waited: float = 0.0


@dataclass
class Timeline:
    """What a step does when.

    Attributes:

    - `seconds`: of the whole step.
    - `events`: kernels and waits; loops with two turns.
    - `sendings`: collectives.
    - `product_seconds`: in which products run.
    """

    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    sendings: list[Sending] = field(default_factory=list)
    product_seconds: float = 0.0

    def hidden_fraction(self, backward: bool, *, everything: bool = False) -> float | None:
        """The share of the time of collectives in which kernels run, for the forward or the backward pass.

        Without `everything`, the first and last layer are left out. Where a pass loops over layers, only what is inside
        the loops counts. Elsewhere collectives of equal kind and size are taken for those of equal layers: the
        first and last of each such family are left out, and families of less than three.

        Returns: None where nothing is sent.
        """
        mine = [sending for sending in self.sendings if sending.backward == backward]
        if not everything:
            looped = [sending for sending in mine if sending.in_loop]
            mine = looped or _between_ends(mine)
        total = sum((sending.end - sending.begin) * sending.turns for sending in mine)
        waited = sum(sending.waited * sending.turns for sending in mine)
        return None if not total else max(0.0, 1 - waited / total)


def walk(program: Program, kernels: Kernels, rates: Rates, num_devices: int) -> Timeline:
    """Walks the schedule of a program.

    Arguments:

    - `program`: what `read_program` returned.
    - `kernels`: facts about its kernels.
    - `rates`: the cost model.
    - `num_devices`: of all devices of the program.
    """
    walker = _Walker(program, kernels, rates, num_devices)
    walker.run(program.computations[program.entry], 1, False)
    walker.timeline.seconds = walker.now
    return walker.timeline


class _Walker:
    def __init__(self, program: Program, kernels: Kernels, rates: Rates, num_devices: int) -> None:
        self.program, self.kernels, self.rates, self.num_devices = program, kernels, rates, num_devices
        self.timeline = Timeline()
        self.now = 0.0
        self.links_free = 0.0
        self.passes: dict[str, dict[str, bool]] = {}

    def run(self, computation: Computation, turns: int, in_loop: bool) -> None:
        """Walks one execution of a computation, which stands for some."""
        sent: dict[str, Sending] = {}
        for instruction in computation.instructions:
            collective = as_collective(self.program, computation, instruction, self.num_devices, turns)
            if collective:
                sent[instruction.name] = self._send(computation, instruction, collective, turns, in_loop)
                if not collective.is_async:
                    self._wait(sent[instruction.name])
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in sent:
                self._wait(sent[instruction.operands[0]])
            elif instruction.opcode == "while":
                self._loop(instruction, turns)
            elif called := scheduled_calls(instruction):
                # Of the branches of a conditional the first; which one runs is not known here.
                self.run(self.program.computations[called[0]], turns, in_loop)
            elif instruction.opcode not in FREE:
                seconds = self.rates.kernel_seconds(self.kernels, computation, instruction)
                product = self.kernels.is_product(instruction)
                if seconds:
                    self._event(instruction.name, "product" if product else "kernel", seconds, turns, in_loop)
                    self.timeline.product_seconds += seconds * turns * product

    def _loop(self, loop: Instruction, turns: int) -> None:
        body = self.program.computations[loop.body]
        trips = loop.trips or 1
        if trips:
            self.run(body, turns, trips > 1)
        if trips > 1:
            began = self.now
            self.run(body, turns * (trips - 1), True)
            self.now += (self.now - began) * (trips - 2)

    def _send(
        self, computation: Computation, instruction: Instruction, collective: Collective, turns: int, in_loop: bool
    ) -> Sending:
        begin = max(self.now, self.links_free)
        self.links_free = begin + self.rates.collective_seconds(collective)
        backward = self._is_backward(computation, instruction, collective)
        sending = Sending(collective, backward, begin, self.links_free, turns, in_loop)
        self.timeline.sendings.append(sending)
        return sending

    def _wait(self, sending: Sending) -> None:
        """Waits for the end of a collective, and charges the time to those that are served meanwhile."""
        if sending.end <= self.now:
            return
        for other in self.timeline.sendings:
            if other.end > self.now and other.begin < sending.end:
                other.waited += min(other.end, sending.end) - max(other.begin, self.now)
        self._event(sending.collective.name, "wait", sending.end - self.now, sending.turns, sending.in_loop)

    def _event(self, name: str, kind: str, seconds: float, turns: int, in_loop: bool) -> None:
        self.timeline.events.append(Event(name, kind, self.now, self.now + seconds, turns, in_loop))
        self.now += seconds

    def _is_backward(self, computation: Computation, instruction: Instruction, collective: Collective) -> bool:
        """Whether a collective belongs to the backward pass: by what it is, where it stands, or who reads it."""
        if collective.kind == "reduce-scatter" or "transpose(jvp" in instruction.op_name:
            return True
        if computation.name not in self.passes:
            self.passes[computation.name] = self._readers(computation)
        return self.passes[computation.name].get(instruction.name, False)

    def _readers(self, computation: Computation) -> dict[str, bool]:
        """For each collective, whether the first product or kernel that reads it is of the backward pass."""
        loops = any("reduce-scatter" in i.opcode for i in computation.instructions)
        if loops and computation.name != self.program.entry:
            return {i.name: True for i in computation.instructions}
        found: dict[str, bool] = {}
        origin: dict[str, set[str]] = {}
        for instruction in computation.instructions:
            sources = {name for operand in instruction.operands for name in origin.get(operand, ())}
            is_start = instruction.opcode.removesuffix("-start") in ("all-gather", "all-reduce", "async")
            if is_start:
                origin[instruction.name] = {instruction.name}
                continue
            through = instruction.opcode in FREE or instruction.opcode.endswith("-done")
            through = through or (bool(sources) and "jvp" not in instruction.op_name)
            if through:
                origin[instruction.name] = sources
            for name in sources if not through or instruction.opcode == "while" else ():
                found.setdefault(name, self._of_backward(instruction))
        return found

    def _of_backward(self, instruction: Instruction) -> bool:
        if "transpose(jvp" in instruction.op_name:
            return True
        if instruction.opcode == "while":
            body = self.program.computations[instruction.body]
            return any("reduce-scatter" in i.opcode or "transpose(jvp" in i.op_name for i in body.instructions)
        return False


def _between_ends(sendings: Sequence[Sending]) -> list[Sending]:
    """The sendings of each family of three or more, without its first and last."""
    families: dict[tuple[str, int], list[Sending]] = {}
    for sending in sorted(sendings, key=lambda sending: sending.begin):
        families.setdefault((sending.collective.kind, sending.collective.nbytes), []).append(sending)
    return [sending for family in families.values() for sending in family[1:-1]]
