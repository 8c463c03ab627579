"""The public names of `regard`, from their packages: what `import regard` offers, loaded when the first is used."""

from regard.attention import attend, attend_state, explain
from regard.cache import KVCache
from regard.calls import Call, observe_calls, replace_outputs
from regard.describe.bias import Alibi, Bias, T5Bias, TensorBias
from regard.describe.check_mask import check_mask
from regard.describe.draw_mask import draw
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, Dilated, Global, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import Blocks, Documents, TensorMask, Tree
from regard.describe.mask_function import MaskFunction
from regard.describe.position import Learned, Position, Rope, Sinusoidal
from regard.dispatch.choose import Plan
from regard.errors import ProblemError, RefusalError, RegardError, SlowWarning, VersionWarning
from regard.nn import MultiHeadAttention
from regard.override.switch import everywhere
from regard.shared_prefix import attend_shared
from regard.state import State
from regard.torch_signature import scaled_dot_product_attention

__all__ = [
    "Alibi",
    "Bias",
    "Blocks",
    "Call",
    "Causal",
    "Dilated",
    "Documents",
    "Global",
    "KVCache",
    "KeyLengths",
    "Learned",
    "Mask",
    "MaskFunction",
    "MultiHeadAttention",
    "Plan",
    "Position",
    "Prefix",
    "ProblemError",
    "RefusalError",
    "RegardError",
    "Rope",
    "Sinusoidal",
    "SlowWarning",
    "State",
    "T5Bias",
    "TensorBias",
    "TensorMask",
    "Tree",
    "VersionWarning",
    "Window",
    "attend",
    "attend_shared",
    "attend_state",
    "check_mask",
    "draw",
    "everywhere",
    "explain",
    "observe_calls",
    "replace_outputs",
    "scaled_dot_product_attention",
]
