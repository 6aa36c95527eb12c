"""Reading compiled programs: recorded texts of several versions and backends, and small ones written for one point."""

from pathlib import Path

import pytest

from vescale_jax.preflight._chip import chip
from vescale_jax.preflight._collective import collectives, replica_group
from vescale_jax.preflight._cost import Rates, flops
from vescale_jax.preflight._fusion import Kernels
from vescale_jax.preflight._gathered import gathered_bytes
from vescale_jax.preflight._gradients import gradient_copy_bytes
from vescale_jax.preflight._text import Array, leaves, nbytes, read_program
from vescale_jax.preflight._timeline import walk
from vescale_jax.preflight._weights import weight_copies

DATA = Path(__file__).parent / "data"


def wrap(body: str, others: str = "") -> str:
    """A program whose entry computation has these lines."""
    return f"HloModule m, is_scheduled=true\n{others}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


# One layer a turn: four turns. The next layer is gathered while this one computes, and nothing is copied.
PREFETCH = """
%body (state: (s32[], bf16[64,64], bf16[8192], bf16[1024])) -> (s32[], bf16[64,64], bf16[8192], bf16[1024]) {
  %state = (s32[], bf16[64,64]{1,0}, bf16[8192]{0}, bf16[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[64,64]{1,0} get-tuple-element(%state), index=1
  %w = bf16[8192]{0} get-tuple-element(%state), index=2
  %shard = bf16[1024]{0} get-tuple-element(%state), index=3
  %start = ((bf16[1024]{0}), bf16[8192]{0}) all-gather-start(%shard), replica_groups=[1,8]<=[8], dimensions={0}
  MIDDLE
  %done = bf16[8192]{0} all-gather-done(%start)
  END
  ROOT %next = (s32[], bf16[64,64]{1,0}, bf16[8192]{0}, bf16[1024]{0}) tuple(%i, %y, %carried, %shard)
}
%condition (state: (s32[], bf16[64,64], bf16[8192], bf16[1024])) -> pred[] {
  %state.1 = (s32[], bf16[64,64]{1,0}, bf16[8192]{0}, bf16[1024]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}
%slice_product (a: bf16[8192], b: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[8192]{0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %part = bf16[4096]{0} slice(%a), slice={[0:4096]}
  %matrix = bf16[64,64]{1,0} bitcast(%part)
  ROOT %dot = bf16[64,64]{1,0} dot(%b, %matrix), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%slice_alone (a.1: bf16[8192]) -> bf16[4096] {
  %a.1 = bf16[8192]{0} parameter(0)
  ROOT %part.1 = bf16[4096]{0} slice(%a.1), slice={[0:4096]}
}
%join (a.2: bf16[8192]) -> bf16[64,96] {
  %a.2 = bf16[8192]{0} parameter(0)
  %one = bf16[4096]{0} slice(%a.2), slice={[0:4096]}
  %one.1 = bf16[64,64]{1,0} bitcast(%one)
  %two = bf16[2048]{0} slice(%a.2), slice={[4096:6144]}
  %two.1 = bf16[64,32]{1,0} bitcast(%two)
  ROOT %joined = bf16[64,96]{1,0} concatenate(%one.1, %two.1), dimensions={1}JOIN
}
%scale (g: bf16[64], h: bf16[64,64]) -> bf16[64,64] {
  %g = bf16[64]{0} parameter(0)
  %h = bf16[64,64]{1,0} parameter(1)
  %wide = bf16[64,64]{1,0} broadcast(%g), dimensions={1}
  ROOT %scaled = bf16[64,64]{1,0} multiply(%wide, %h)
}
%gain (a.3: bf16[8192]) -> bf16[64] {
  %a.3 = bf16[8192]{0} parameter(0)
  ROOT %small = bf16[64]{0} slice(%a.3), slice={[8000:8064]}
}
"""
ENTRY = """
  %shard.0 = bf16[1024]{0} parameter(0)
  %x.0 = bf16[64,64]{1,0} parameter(1)
  %first = bf16[8192]{0} all-gather(%shard.0), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[64,64]{1,0}, bf16[8192]{0}, bf16[1024]{0}) tuple(%zero, %x.0, %first, %shard.0)
  %loop = (s32[], bf16[64,64]{1,0}, bf16[8192]{0}, bf16[1024]{0}) while(%begin), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  ROOT %out = bf16[64,64]{1,0} get-tuple-element(%loop), index=1
"""
IN_PLACE = "%y = bf16[64,64]{1,0} fusion(%w, %x), kind=kCustom, calls=%slice_product"


def loop(middle: str = IN_PLACE, end: str = "", carried: str = "%done", join: str = "") -> str:
    text = (
        PREFETCH.replace("MIDDLE", indented(middle))
        .replace("END", end)
        .replace("%carried", carried)
        .replace("JOIN", join)
    )
    return wrap(ENTRY, text)


def test_a_product_that_reads_its_weight_in_place_copies_nothing() -> None:
    program = read_program(loop())
    assert program.turns == {"main": 1, "body": 4}
    found = weight_copies(program, Kernels(program))
    assert not found.copies
    assert not found.merged
    assert not found.others


@pytest.mark.parametrize(
    ("middle", "end", "carried", "join", "kind", "nbytes"),
    [
        # A slice by itself, read by a product: 4096 bfloat16 in each of four turns.
        ("%s = bf16[4096]{0} fusion(%w), kind=kLoop, calls=%slice_alone\n"
         "%m = bf16[64,64]{1,0} bitcast(%s)\n"
         "%y = bf16[64,64]{1,0} dot(%x, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
         "", "%done", "", "copies", 4 * 8192),
        # A transpose of it on top is one more.
        ("%s = bf16[4096]{0} fusion(%w), kind=kLoop, calls=%slice_alone\n"
         "%m = bf16[64,64]{1,0} bitcast(%s)\n"
         "%t = bf16[64,64]{1,0} transpose(%m), dimensions={1,0}\n"
         "%y = bf16[64,64]{1,0} dot(%x, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
         "", "%done", "", "copies", 2 * 4 * 8192),
        # The carry: a copy of the whole buffer at the end of each turn.
        (IN_PLACE, "%again = bf16[8192]{0} copy(%done)", "%again", "", "copies", 4 * 16384),
        # Two weights put side by side for one product: by XLA, or because the model asks for it.
        ("%j = bf16[64,96]{1,0} fusion(%w), kind=kInput, calls=%join\n"
         "%z = bf16[64,96]{1,0} dot(%x, %j), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n" + IN_PLACE,
         "", "%done", "", "merged", 4 * 64 * 96 * 2),
        ("%j = bf16[64,96]{1,0} fusion(%w), kind=kInput, calls=%join\n"
         "%z = bf16[64,96]{1,0} dot(%x, %j), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n" + IN_PLACE,
         "", "%done", ', metadata={op_name="jit(f)/concatenate"}', "copies", 4 * 64 * 96 * 2),
        # The gain of a norm is moved, but no product reads it.
        ("%g.1 = bf16[64]{0} fusion(%w), kind=kLoop, calls=%gain\n"
         "%h.1 = bf16[64,64]{1,0} fusion(%g.1, %x), kind=kLoop, calls=%scale\n" + IN_PLACE,
         "", "%done", "", "others", 4 * 128),
    ],
    ids=["slice", "transpose", "carry", "merged", "asked for", "gain"],
)  # fmt: skip
def test_copies_of_weights(middle: str, end: str, carried: str, join: str, kind: str, nbytes: int) -> None:
    program = read_program(loop(middle, end, carried, join))
    found = weight_copies(program, Kernels(program))
    assert {name: sum(c.nbytes for c in getattr(found, name)) for name in ("copies", "merged", "others")} == {
        "copies": 0, "merged": 0, "others": 0, kind: nbytes
    }  # fmt: skip


def test_gathered_buffers_alive_at_once() -> None:
    # In a turn the layer that computes and the one that is on its way; never the one before the loop as well.
    assert gathered_bytes(read_program(loop())) == 2 * 16384
    one = "%g = bf16[8192]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}\n"
    two = one.replace("%g", "%h")
    use = "%u = bf16[8192]{0} add(%g, %g)\n"
    ends = "ROOT %r = bf16[8192]{0} add(%h, %h)"
    head = "%p = bf16[4096]{0} parameter(0)\n"
    assert gathered_bytes(read_program(wrap(indented(head + one + use + two + ends)))) == 16384
    assert gathered_bytes(read_program(wrap(indented(head + one + two + use + ends)))) == 2 * 16384


def indented(lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines.splitlines())


@pytest.mark.parametrize(
    ("lines", "nbytes"),
    [
        ("%packed = bf16[8192]{0} concatenate(%a, %b), dimensions={0}", 0),
        ("%ab = bf16[8192]{0} concatenate(%a, %b), dimensions={0}\n%packed = bf16[8192]{0} copy(%ab)", 16384),
        ("%c = bf16[4096]{0} copy(%a)\n%packed = bf16[8192]{0} concatenate(%c, %b), dimensions={0}", 8192),
        ("%packed = bf16[8192]{0} add(%q, %q)", 0),
    ],
)
def test_copies_of_gradients(lines: str, nbytes: int) -> None:
    head = "%a = bf16[4096]{0} parameter(0)\n%b = bf16[4096]{0} parameter(1)\n%q = bf16[8192]{0} parameter(2)\n"
    end = "\nROOT %r = bf16[4096]{0} reduce-scatter(%packed), replica_groups={{0,1}}, dimensions={0}, to_apply=%sum"
    program = read_program(wrap(indented(head + lines + end)))
    assert gradient_copy_bytes(program, Kernels(program), collectives(program, 2)) == nbytes


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("[1,8]<=[8]", tuple(range(8))),
        ("mesh['fsdp'=8] {'fsdp'}", tuple(range(8))),
        ("mesh['replica'=2,'fsdp'=4] {'fsdp'}", (0, 1, 2, 3)),
        ("mesh['replica'=2,'fsdp'=4] {'replica'}", (0, 4)),
        ("{}", tuple(range(8))),
        ("", tuple(range(8))),
    ],
)
def test_replica_groups(text: str, group: tuple[int, ...]) -> None:
    assert replica_group(text, 8) == group


def test_types_and_operands_in_any_print() -> None:
    lines = """
      %p = (bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/(f8e4m3fn[5]{0}, pred[])) parameter(0)
      %e = f8e4m3fn[5]{0} get-tuple-element((bf16[2,3]{1,0}, (f8e4m3fn[5]{0}, pred[])) %p), index=1
      constant.1 = f32[2]{0} constant({1, 2})
      ROOT q = f32[2]{0} add(constant.1, constant.1), metadata={op_name="a(b)/c, d=\\"e\\""}
    """
    program = read_program(wrap(lines))
    by_name = program.computations["main"].by_name
    assert leaves(by_name["p"].shape) == (Array("bf16", (2, 3)), Array("f8e4m3fn", (5,)), Array("pred", ()))
    assert nbytes(by_name["p"].shape) == 12 + 5 + 1
    assert by_name["e"].operands == ("p",)
    assert by_name["q"].operands == ("constant.1", "constant.1")
    assert by_name["q"].op_name == 'a(b)/c, d=\\"e\\"'


def test_a_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError) as refused:
        read_program("func.func @main()")
    assert str(refused.value) == (
        "read_program: got a text of 17 characters without an ENTRY computation; want compiled HLO; pass "
        "compiled.as_text()"
    )


# What was recorded is the step of `record.py` beside it: one layer in a list and a stack of seven, on 8 devices.
RECORDED = sorted(path.name for path in DATA.glob("*.hlo"))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_programs(name: str) -> None:
    program = read_program((DATA / name).read_text())
    kernels = Kernels(program)
    found = collectives(program, 8)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + one.turns
        assert len(one.group) == 8
    # Each of the eight layers is gathered twice and reduced once; one psum carries the loss and the norm.
    assert counts["reduce-scatter"] == 8
    assert counts["all-gather"] == 16
    assert counts["all-reduce"] == 1
    assert any(one.is_async for one in found) == ("h100" in name)
    if "h100" in name:
        assert not weight_copies(program, kernels).copies
    timeline = walk(program, kernels, Rates(chip("h100"), 8), 8)
    shares = [timeline.hidden_fraction(backward, everything=True) for backward in (False, True)]
    assert all(share is not None and 0 <= share <= 1 for share in shares)
    assert (max(share or 0 for share in shares) > 0) == ("h100" in name)
    work = sum(
        flops(kernels, computation, one)[0] * turns
        for computation, turns in program.scheduled()
        for one in computation.instructions
    )
    # 64 x 64 weights of eight layers meet the 8 rows of a device three times, 2 FLOPs each.
    assert work == 2 * 3 * 8 * 64 * 64 * 8
