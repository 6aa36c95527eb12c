"""Optimizers that need blocks, as optax transformations over the flat buffers of a sharded model.

Element-wise optimizers need nothing from here: optax's own work on the buffers as they are.
"""

from vescale_jax._step_aside import steps_aside as steps_aside

from ._adamw_8bit import AdamW8bitState as AdamW8bitState
from ._adamw_8bit import Moment8bit as Moment8bit
from ._adamw_8bit import Moments8bit as Moments8bit
from ._adamw_8bit import adamw_8bit as adamw_8bit
from ._codes import Code as Code
from ._labels import by_path as by_path
from ._labels import scale_by_path as scale_by_path
from ._muon import muon as muon
from ._muon import muon_work as muon_work
from ._muon_matrix import Matrix as Matrix
from ._muon_state import MuonMoments as MuonMoments
from ._muon_state import MuonState as MuonState
from ._newton_schulz import newton_schulz as newton_schulz
from ._per_parameter import PerParameter as PerParameter
from ._per_parameter import per_parameter as per_parameter
from ._per_parameter_state import Columns as Columns
from ._precisions import Precision as Precision
from ._precisions import precisions as precisions
from ._roots import RootMethod as RootMethod
from ._roots import inverse_root as inverse_root
from ._rule_table import RuleRow as RuleRow
from ._rule_table import RuleState as RuleState
from ._rule_table import RuleTable as RuleTable
from ._rule_table import describe as describe
from ._shampoo import Grafting as Grafting
from ._shampoo import Roots as Roots
from ._shampoo import ShampooMoments as ShampooMoments
from ._shampoo import ShampooState as ShampooState
from ._shampoo import shampoo as shampoo
from ._shampoo_statistics import Statistics as Statistics
from ._soap import Bases as Bases
from ._soap import SoapMoments as SoapMoments
from ._soap import SoapState as SoapState
from ._soap import soap as soap
