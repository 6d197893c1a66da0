"""Instructions are counted on the way that a whole tile takes through a kernel."""

import pytest

from benchmarks import machine_code
from benchmarks.machine_code import count, parse, shortest_way


# As cuobjdump prints it: a fast way (0030 on), a slow one, and a loop that never ends.
LISTING = """
\t\tFunction : void f<2>(int)
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   ISETP.NE.AND P0, PT, R4, RZ, PT ;  /* 0x000000ff */
                                                                      /* 0x000fe200 */
        /*0010*/              @!P0 BRA 0x60 ;
        /*0020*/                   BRA P1, 0x20 ;
        /*0030*/                   F2I.U32.TRUNC R1, R2 ;
        /*0040*/               @P2 EXIT ;
        /*0050*/                   LOP3.LUT R3, R3, 0xff, RZ, 0xc0, !PT ;
        /*0060*/                   STG.E [R2], R1 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80;
\t\tFunction : g
        /*0000*/                   EXIT ;
"""


def addresses(way):
    return [instruction.address for instruction in way]


@pytest.fixture(scope="module")
def kernel():
    kernels = parse(LISTING)
    assert list(kernels) == ["void f<2>(int)", "g"]
    return kernels["void f<2>(int)"]


def test_a_listing_is_read_with_conditions_and_operands(kernel):
    assert len(kernel) == 9
    assert kernel[1].condition == "!P0"
    assert (kernel[3].name, kernel[3].operation) == ("F2I", "F2I.U32.TRUNC")
    assert kernel[5].operands == "R3, R3, 0xff, RZ, 0xc0, !PT"


def test_a_way_is_the_shortest_that_comes_by_all_marks_in_order(kernel):
    assert addresses(shortest_way(kernel, [])) == [0x00, 0x10, 0x60, 0x70]

    def converts(instruction):
        return instruction.name == "F2I"

    def stores(instruction):
        return instruction.name == "STG"

    assert addresses(shortest_way(kernel, [converts])) == [0x00, 0x10, 0x20, 0x30, 0x40]
    assert addresses(shortest_way(kernel, [converts, stores])) == list(
        range(0, 0x71, 16)
    )
    assert shortest_way(kernel, [stores, converts]) is None


def test_instructions_are_counted_by_unit_for_an_element(kernel):
    assert count(kernel) == {
        "all": 9 / 64,
        "integer": 2 / 64,
        "conversion": 1 / 64,
    }


def test_a_bound_is_that_of_the_slowest_unit():
    # 132 multiprocessors of 1.98 GHz start 128 lanes in a cycle; 4.8 TB/s.
    few_conversions = {"all": 16.0, "integer": 4.0, "conversion": 0.0}
    assert machine_code.bound("H200", few_conversions, 4.0) == pytest.approx(
        132 * 1.98e9 * 128 / 16 * 4 / 4.8e12
    )
    many_conversions = few_conversions | {"conversion": 4.0}
    assert machine_code.bound("H200", many_conversions, 4.0) == pytest.approx(
        132 * 1.98e9 * 16 / 4 * 4 / 4.8e12
    )
