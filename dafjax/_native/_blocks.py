"""Quantization groups ("blocks") and tiles of a row, in jax.numpy.

`xla_ffi/README.md`, sections 1 and 4.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from dafjax._native._layout import LANES, ROWS, TILE, folded_width
from dafjax._typing import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the elements of a row are grouped; all methods keep the leading axes.

    Attributes:
        block_size: Elements of a group.
        columns: Columns of the matrix that a row stands for; 0 for groups of
            consecutive elements.
    """

    block_size: int
    columns: int

    def padded_size(self, size: int) -> int:
        """Returns the least size of whole groups and whole tiles that holds `size`."""
        unit = math.lcm(self.block_size, TILE if self.columns == 0 else ROWS)
        unit *= self._width
        return -(-size // unit) * unit

    def to_blocks(self, x: Array) -> Array:
        """Arranges a padded row as `[blocks, block_size]`."""
        *batch, size = x.shape
        rows = (*batch, size // self.block_size // self._width)
        blocks = x.reshape(*rows, self.block_size, self._width).swapaxes(-1, -2)
        return blocks.reshape(*batch, size // self.block_size, self.block_size)

    def from_blocks(self, blocks: Array) -> Array:
        """Inverts `to_blocks`."""
        *batch, count, _ = blocks.shape
        x = blocks.reshape(*batch, count // self._width, self._width, self.block_size)
        return x.swapaxes(-1, -2).reshape(*batch, count * self.block_size)

    def to_tiles(self, x: Array) -> Array:
        """Arranges a padded row as `[tiles, 16, 32]`."""
        *batch, size = x.shape
        groups = self.lane_groups
        x = x.reshape(*batch, size // TILE // groups, ROWS, groups, LANES)
        return x.swapaxes(-2, -3).reshape(*batch, size // TILE, ROWS, LANES)

    def from_tiles(self, tiles: Array) -> Array:
        """Inverts `to_tiles`."""
        *batch, count, _, _ = tiles.shape
        groups = self.lane_groups
        x = tiles.reshape(*batch, count // groups, groups, ROWS, LANES)
        return x.swapaxes(-2, -3).reshape(*batch, count * TILE)

    def spread(self, parameters: Array, positions: int) -> Array:
        """Broadcasts the parameters of groups to their elements.

        Args:
            parameters: `[*batch, blocks]`.
            positions: Number of rows of 32 elements, or of folded rows.

        Returns:
            `[*batch, positions, lanes]`.
        """
        *batch, count = parameters.shape
        rows = count // self._width
        length = self.block_size if self.columns else self.block_size // LANES
        lanes = self.lane_groups * LANES
        spread = jnp.broadcast_to(
            parameters.reshape(*batch, rows, 1, self._width),
            (*batch, rows, length, lanes),
        )
        spread = spread.reshape(*batch, rows * length, lanes)
        return lax.slice_in_dim(spread, 0, positions, axis=-2)

    def of_tiles(self, parameters: Array, tiles: int) -> tuple[Array, Array]:
        """Returns the parameters of two groups of each tile.

        Args:
            parameters: uint32 `[*batch, blocks]`; the stored groups suffice.
            tiles: Number of tiles of a row.

        Returns:
            The parameters of the group of lane 0 in row 0, and of the group of lane 28
            in row 14, each `[*batch, tiles]`; 0 where there is no such group.
        """
        # Only slices and broadcasts: XLA fuses these into the kernel that reads them.
        *batch, count = parameters.shape
        groups = self.lane_groups
        if self.columns:
            per_block = self.block_size // ROWS
            grid = parameters.reshape(*batch, count // self._width, 1, groups, LANES)
            found = [lax.slice_in_dim(grid, n, n + 1, axis=-1) for n in (0, 28)]
        else:
            per_block = max(1, self.block_size // TILE)
            of_tile = max(1, TILE // self.block_size)
            missing = -(-tiles // per_block) * of_tile - count
            padding = [(0, 0, 0)] * len(batch) + [(0, missing, 0)]
            padded = lax.pad(parameters, jnp.uint32(0), padding)
            grid = padded.reshape(*batch, -1, 1, groups, of_tile)
            last = of_tile * 7 // 8
            found = [lax.slice_in_dim(grid, n, n + 1, axis=-1) for n in (0, last)]
        first, last = (self._repeat(x[..., 0], per_block, tiles) for x in found)
        return first, last

    def _repeat(self, blocks: Array, times: int, tiles: int) -> Array:
        """Repeats a group's parameters for the tiles that lie below one another."""
        *batch, count, _, groups = blocks.shape
        repeated = jnp.broadcast_to(blocks, (*batch, count, times, groups))
        repeated = repeated.reshape(*batch, count * times * groups)
        return lax.slice_in_dim(repeated, 0, tiles, axis=-1)

    @property
    def lane_groups(self) -> int:
        """Number of tiles that lie side by side."""
        return 1 if self.columns == 0 else folded_width(self.columns) // LANES

    @property
    def _width(self) -> int:
        """Number of groups that lie side by side."""
        return 1 if self.columns == 0 else folded_width(self.columns)
