"""Kernels and bytes are counted as the compiled program runs them."""

import pytest

from benchmarks.gpu_work import Work, work_of


# A loop that runs four times: a kernel takes part of an array, doubles it, and puts it
# into another; a product by a library has scratch memory.
PROGRAM = """
HloModule jit_f, is_scheduled=true

%doubled (a: f32[4,8], b: f32[4,8], i: s32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %part = f32[1,8]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,8}
  %twice = f32[1,8]{1,0} add(%part, %part)
  %b = f32[4,8]{1,0} parameter(1)
  %flat = f32[32]{0} bitcast(%b)
  %whole = f32[4,8]{1,0} bitcast(%flat)
  ROOT %put = f32[4,8]{1,0} dynamic-update-slice(%whole, %twice, %i, %zero)
}

%body (carry: (s32[], f32[4,8], f32[4,8])) -> (s32[], f32[4,8], f32[4,8]) {
  %carry = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %y = f32[4,8]{1,0} get-tuple-element(%carry), index=2
  %written = f32[4,8]{1,0} fusion(%x, %y, %n), kind=kLoop, calls=%doubled
  %tied = f32[4,8]{1,0} custom-call(%written), custom_call_target="dafjax_tie"
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(%n, %x, %tied)
}

ENTRY %main (x: f32[4,8], y: bf16[4,8]) -> (f32[4,4], u8[1024]) {
  %x = f32[4,8]{1,0} parameter(0)
  %y = bf16[4,8]{1,0} parameter(1)
  %s = (s32[], f32[4,8]{1,0}, f32[4,8]{1,0}) tuple(%x, %x, %x)
  %l = (s32[], f32[4,8], f32[4,8]) while(%s), body=%body, "known_trip_count":{"n":"4"}
  %made = f32[4,8]{1,0} get-tuple-element(%l), index=2
  ROOT %ab = (f32[4,4], u8[1024]{0}) custom-call(%made, %y), custom_call_target="__cu$"
}
"""


def test_a_program_is_counted_as_often_as_it_runs():
    kernel = 4 + 2 * 8 * 4
    product = 4 * 8 * (4 + 2) + 4 * 4 * 4
    assert work_of(PROGRAM) == Work(kernels=4 + 1, moved_nbytes=4 * kernel + product)


def test_what_is_read_as_a_whole_too_counts_as_that():
    sliced = work_of(PROGRAM).moved_nbytes
    read_whole = PROGRAM.replace("add(%part, %part)", "add(%part, %a)")
    assert work_of(read_whole).moved_nbytes == sliced + 4 * (4 * 8 - 8) * 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"known_trip_count"', '"other"', "How often the loop `l` runs"),
        ("bf16[4,8]", "f3[4,8]", "The size of `f3`"),
        ("custom-call(%made", "conditional(%made", "`ab`: conditions"),
        ("calls=%doubled", "", "`written` has no `calls`"),
        ("ENTRY", "", "There is no `ENTRY`"),
    ],
)
def test_what_cannot_be_counted_is_refused(old, new, message):
    with pytest.raises(ValueError, match=message):
        work_of(PROGRAM.replace(old, new))
