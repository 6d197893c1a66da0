#ifndef DAFJAX_FFI_HANDLERS_H_
#define DAFJAX_FFI_HANDLERS_H_

struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;

// The custom calls, under the names that programs know them by.
extern "C" {

// x [*batch, n] float32, bfloat16 or float16; seed [] uint32
//   -> codes [*batch, NumWords()] uint16,
//      scale, minimum [*batch, NumBlocks()] bfloat16: sizes as in AffineShape;
//      if dithered, seeds [*batch] uint32: seed + salt, for the decoder
// attributes: bits, block_size, columns, stochastic and dithered (0 or 1), salt, which is
// added to the seed, int64
XLA_FFI_Error* dafjax_pack_affine(XLA_FFI_CallFrame* call_frame);

// codes, scale, minimum; if dithered, seeds [*batch] uint32; then any operands, which are
// not read: they order the program
//   -> y [*batch, n] float32, bfloat16 or float16
// attributes: bits, block_size, columns, dithered (0 or 1), int64
XLA_FFI_Error* dafjax_unpack_affine(XLA_FFI_CallFrame* call_frame);

// x [*batch, n] bool -> words [*batch, NumWords(n, 1)] uint16
XLA_FFI_Error* dafjax_pack_bitmask(XLA_FFI_CallFrame* call_frame);

// words; then any operands, which are not read -> y [*batch, n] bool
XLA_FFI_Error* dafjax_unpack_bitmask(XLA_FFI_CallFrame* call_frame);

// x [*batch, m, n] float32, bfloat16 or float16; seed [] uint32
//   -> handle [*batch, 4] uint32: of each batch of rows [m, n], one entry in a page pool
// attributes: pool and site, hashes of names; max_bits, block_size, columns, stochastic
// (0 or 1), int64. How many bits a code has, max_bits at most, is the pool's to say.
XLA_FFI_Error* dafjax_pool_put(XLA_FFI_CallFrame* call_frame);

// handle; then any operands, which are not read
//   -> y [*batch, m, n] float32, bfloat16 or float16. A handle of zeros, as JAX makes them
//      for branches that are not taken, is that of zeros.
// attributes: pool, reads, block_size, columns, int64. A backward pass makes `reads` calls
// for an entry; 0: that is unknown.
XLA_FFI_Error* dafjax_pool_get(XLA_FFI_CallFrame* call_frame);

// sensitivities [*batch, n + 1] float32; then any operands, which are not read
//   -> done uint8: what a backward pass measured of n sites, and the squared norm of the
//      gradient
// attributes: pool, int64; sites, n int64
XLA_FFI_Error* dafjax_pool_note(XLA_FFI_CallFrame* call_frame);

// importances [*batch, n + 1] float32; then any operands, which are not read
//   -> done uint8: the importances of n sites that a backward pass has measured, and the
//      squared norm of the gradient; added up in a ledger, if there is still one
// attributes: ledger, the hash of its name, int64; sites, n int64
XLA_FFI_Error* dafjax_ledger_note(XLA_FFI_CallFrame* call_frame);

// x [*batch, n] float32, bfloat16 or float16
//   -> minimum, maximum [*batch] float32,
//      scratch [*batch, ScratchWords(n)] uint32: format/reduction.h
// attributes: strategy, int64, the number of a Strategy
XLA_FFI_Error* dafjax_minmax(XLA_FFI_CallFrame* call_frame);

// x -> sum [*batch] float32, scratch: as above
XLA_FFI_Error* dafjax_sum_of_squares(XLA_FFI_CallFrame* call_frame);

// x float32: values that reductions are timed with
//   -> seconds [rounds, n] float32: of one launch of each of n reductions,
//      scratch uint32; first, second float32: as large as any of them needs
// attributes: timed, 5 n int64: reduction (0: minmax, 1: sum_of_squares), strategy, number
// of rows, of elements of a row, of launches at once
XLA_FFI_Error* dafjax_time_reductions(XLA_FFI_CallFrame* call_frame);

// Any operands -> the same values. Each result normally shares the operand's memory.
XLA_FFI_Error* dafjax_tie(XLA_FFI_CallFrame* call_frame);

}  // extern "C"

namespace dafjax {

// Of the XLA headers that the handlers are built with.
int FfiApiMajorVersion();
int FfiApiMinorVersion();

}  // namespace dafjax

#endif  // DAFJAX_FFI_HANDLERS_H_
