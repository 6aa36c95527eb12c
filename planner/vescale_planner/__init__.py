"""The planner of vescale_jax: where every tensor of a group lies in one flat buffer, pure Python and without JAX.

    from vescale_planner import TensorSpec, Tile, plan_group

    plan = plan_group([TensorSpec("up", (4096, 14336), Tile(32, 32)), TensorSpec("norm", (4096,))], num_shards=64)
    print(plan)

In come names, shapes and blocks, out goes a plan: the same number of elements on every shard, no block cut, no padding
inside a tensor and as little as possible between. The problem and the idea are those of veScale-FSDP (arXiv
2602.22437).
"""

from ._advice import Advice as Advice
from ._advice import advise as advise
from ._beside import part_of as part_of
from ._blocks import Block as Block
from ._blocks import Elements as Elements
from ._blocks import Rows as Rows
from ._blocks import Slab as Slab
from ._blocks import Tile as Tile
from ._blocks import WholeTensor as WholeTensor
from ._cuts import Cuts as Cuts
from ._faults import Faults as Faults
from ._group import StorageChoice as StorageChoice
from ._group import plan_group as plan_group
from ._orders import Order as Order
from ._plan import GroupPlan as GroupPlan
from ._plan import LowerBound as LowerBound
from ._plan import Piece as Piece
from ._plan import Slot as Slot
from ._savings import storage_savings as storage_savings
from ._specs import TensorSpec as TensorSpec
from ._storage import Storage as Storage
from ._tiles import TileOrder as TileOrder
from ._unit import plan_unit as plan_unit
from ._units import cap_unit as cap_unit
from ._units import keep_small_whole as keep_small_whole
