"""Flat, ragged buffers on a JAX mesh: placements, layouts, packing, gather and reduce-scatter."""

from ._block_arrays import BlockArrays as BlockArrays
from ._block_index import Batch as Batch
from ._block_index import BlockIndex as BlockIndex
from ._block_index import block_index as block_index
from ._block_index import choose_blocks as choose_blocks
from ._block_view import BlockView as BlockView
from ._block_view import LocalBlocks as LocalBlocks
from ._collectives import gather as gather
from ._collectives import reduce_scatter as reduce_scatter
from ._collectives import sum_dtype as sum_dtype
from ._dbuffer import DBuffer as DBuffer
from ._layout import Layout as Layout
from ._layout import Location as Location
from ._pack import pack as pack
from ._pack import unpack as unpack
from ._ragged import RaggedShard as RaggedShard
