"""Checkpoints that do not depend on the mesh that wrote them, and the exchange of single tensors."""

from ._checkpointer import Checkpointer as Checkpointer
from ._contents import Contents as Contents
from ._contents import TensorRow as TensorRow
from ._contents import contents as contents
from ._contents import verify as verify
from ._errors import DamagedError as DamagedError
from ._exchange import Names as Names
from ._exchange import Take as Take
from ._orbax import export_orbax as export_orbax
from ._orbax import import_orbax as import_orbax
from ._restore import Restored as Restored
from ._restore import restore as restore
from ._safetensors import export_safetensors as export_safetensors
from ._safetensors import import_safetensors as import_safetensors
from ._save import save as save
