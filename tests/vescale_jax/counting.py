"""What a compiled program does: collectives and bytes, read from its text and from the compiler's own account."""

import re
from collections import Counter
from typing import Any

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")


def collectives(compiled: Any) -> dict[str, int]:
    """How often each collective stands in the compiled text; what does not occur is left out."""
    # An instruction is `%name = type opcode(`; on accelerators the opcode may end in -start.
    pattern = rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\("
    # The types of long tuples hold comments such as /*index=5*/.
    return dict(Counter(re.findall(pattern, re.sub(r"/\*.*?\*/", "", compiled.as_text()))))


def wire_dtypes(lowered: Any, operation: str) -> list[str]:
    """The operands' dtypes of a collective, in the program that XLA is given."""
    text = lowered.as_text()
    if operation == "all_gather":
        return re.findall(r'"stablehlo.all_gather"\(.*\) <.*> : \(tensor<(?:\d+x)*(\w+)>\)', text)
    return re.findall(rf'"stablehlo.{operation}"\(.*?\}}\) : \(tensor<(?:\d+x)*(\w+)>\)', text, re.DOTALL)
