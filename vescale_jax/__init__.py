"""Fully sharded training for JAX in which the optimizer's and the number format's blocks stay whole."""

from . import checkpoint as checkpoint
from . import optimizers as optimizers
from ._accumulation import Accumulation as Accumulation
from ._apply import apply as apply
from ._batch import own_rows as own_rows
from ._compiler_options import compiler_options as compiler_options
from ._describe import Description as Description
from ._describe import GroupRow as GroupRow
from ._describe import describe as describe
from ._fully_shard import fully_shard as fully_shard
from ._gradient import Value as Value
from ._gradient import value_and_grad as value_and_grad
from ._hosts import Hosts as Hosts
from ._hosts import join_hosts as join_hosts
from ._loss import Mean as Mean
from ._policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from ._sharded import Sharded as Sharded
from ._sharded import unshard as unshard
from ._train import Metrics as Metrics
from ._train import TrainState as TrainState
from ._train import TrainStep as TrainStep
from ._train import train_state as train_state
from ._train import train_step as train_step
