"""Optimizers that need blocks, as optax transformations over the flat buffers of a sharded model.

Element-wise optimizers need nothing from here: optax's own work on the buffers as they are.
"""

from ._adamw_8bit import AdamW8bitState as AdamW8bitState
from ._adamw_8bit import Moment8bit as Moment8bit
from ._adamw_8bit import Moments8bit as Moments8bit
from ._adamw_8bit import adamw_8bit as adamw_8bit
from ._codes import Code as Code
from ._precisions import Precision as Precision
from ._precisions import precisions as precisions
