"""Every threshold of planning and scheduling, with unit, reason and measurement.

Tracing reads them. "Guess" marks a threshold that nobody measured. Settings for users
are options of `remat_compress` instead.
"""

# --- Sizes

# Bytes. Smaller values are saved uncompressed; all iterations of a loop count together.
# They do not prevent a cut, and nothing is recomputed for their sake. Guess.
SMALL_NBYTES = 16 * 1024

# Elements that a value has in common with one element of its statistic: from this ratio
# on, the statistic is saved exactly. (A norm over groups of 8 channels with a statistic
# in codes: gradients 71 to 879 times their norm off. `benchmarks.gradient_noise`)
STATISTIC_OF = 8

# Elements. From this size on, the parts of an array that a norm keeps apart get a scale
# each. For fewer, a scale of one byte would cost more than 1 bit per element.
FEWEST_PER_SCALE = 8

# Terms. A sum of this many has hardly any noise of a single one. Guess.
MANY_TERMS = 16

# Elements. Noise that so many elements share counts as shared. (With 16, the mean of 16
# gradients through a norm over 48 channels, one of them large, was off by 0.9 of the
# norm. `benchmarks.gradient_noise`)
MANY_SHARING = 64

# --- Bits

# Bits of residuals that an exponential or the like amplifies: an error of 1 in an
# exponent is a factor of 2.7, so fewer bits are not enough.
AMPLIFIED_BITS = 8

# Fraction of all bits that small residuals may cost more. (`benchmarks.bit_allocation`)
SPARE_BITS = 1 / 32

# --- Recompute or save

# Times the elements of its sources. A larger array is recomputed: 8 bits instead of 2
# for the sources then cost less than 2 bits for the array.
EXPANSION = 3

# Terms. Recomputing a longer sum of products takes more time than packing its result.
# Guess.
MOST_CONTRACTED = 128

# Multiplications of a matrix product that take the time to draw one number. (On two
# cores with AVX2 a normal number takes 13 ns; a multiplication 0.1 to 0.024 ns in
# products of matrices of width 256 to 1024.)
PRODUCTS_OF_DRAW = 200

# Elements of a pooling window. The program has a line for each place in a window; for
# larger windows JAX's search stays. Guess.
MOST_PLACES = 64

# Times the largest value: where codes take away more bytes, they save memory for sure,
# and no model is asked. (A backward pass holds three such values or so. Guess.)
SURELY_WORTH = 4

# Fraction of the largest value: a limit on every value made while short-lived residuals
# are stored, and on the total size of these. (At its peak, a step holds about three
# values of the largest size. `benchmarks.pool_budget`)
SHORT_LIVED = 1 / 2

# --- Segments of `rematerialize`

# Bits per element of values saved between segments, and about the bits per element of
# residuals within one: 2 for most, 4 for some.
BETWEEN_BITS = 8
WITHIN_BITS = 3

# Places that are tried for the first cut. Guess.
MOST_FIRST_CUTS = 16

# --- Stages of the backward pass

# A stage begins earlier if live bytes fall by this factor. Beginning early takes
# equations away from the previous stage. (Without such stages GPT-2 takes 20 % more, in
# a scan 11 %. `benchmarks.transformer_memory`)
FAR_FEWER_BYTES = 1.5

# On GPUs instead: before a sum of two terms, up to twice as many bytes are live.
TERMS_OF_SUM = 2

# Bytes of a value that is read before the first barrier. Guess.
LITTLE_NBYTES = 1024

# --- Chunks of a stage

# Bytes of an array per chunk, at least: in a chunk loop, and unrolled. Smaller chunks
# are slower, and save little because the whole is small. Each unrolled chunk is a
# kernel of its own and costs some microseconds.
LEAST_NBYTES_OF_CHUNK = 1 << 20
LEAST_NBYTES_UNROLLED = 8 << 20

# Unrolled chunks, at most: they cost launches, and a loop over eight takes hardly less
# memory.
MOST_UNROLLED = 4

# Chunks, at most, if the user gives no number: in chunk loops; unrolled, with decoding
# fused into its consumers; unrolled, if custom calls decode.
# With fused decoding the backward pass has as many large live arrays as the forward
# pass, mostly three. So chunks on GPUs cost launches and save next to nothing: with two
# chunks the memory of only two of 17 H200 programs changed by 0.5 % or more. If custom
# calls decode, as from a page pool, four chunks save memory: a ResNet-18 with 256
# images takes 213 MB, with two chunks 245 MB, unchunked 277 MB.
# (`benchmarks.gpu_memory`)
CHUNKS_IN_LOOPS = 8
CHUNKS_UNROLLED = 1
CHUNKS_UNROLLED_OF_CALLS = 4

# Share of the bytes of a forward pass whose arrays begin with an axis of length 1, at
# least, for the pass that drops such axes. In transformers with an axis of groups of
# heads it is 0.21 or more, in the other networks of the zoo 0.05 or less.
LEAST_SHARE_WITH_UNIT_AXIS = 1 / 8

# Size of a stage's largest residual, at least, as a fraction of the program's largest.
# A stage takes about five times its largest residual unchunked, and about three times
# chunked. So chunking a stage below this fraction saves little (up to 3 %).
# (`benchmarks.step_memory`)
LEAST_SHARE_OF_LARGEST = 0.6

# Times the bytes that are concatenated again: results that stay in chunks must have
# more. Guess.
LEAST_CHUNKED_RESULTS = 4

# --- Layout and statistics

# Share that padding may add to a row of codes; beyond it, several rows are joined.
MOST_PADDING = 1 / 8

# Elements that are sampled of a value to measure its moments. (With half as many, the
# gradient of a ResNet-18 early in training has 3 times the variance that it could
# have. `benchmarks.importance`)
SAMPLED_ELEMENTS = 1 << 15

# Elements that are summed one after another. If the first of n is far from all others,
# the sum of squares has a relative error of n * eps, and the variance is 1 / n of it.
LONGEST_ROW = 1024
