"""regard: the attention mechanism as a library.

Say in one line which tokens may look at which; regard computes it exactly and fast on the machine at hand, tells what
it costs before it runs, and shows what it did afterwards.
"""

from regard.attend import Call, altering, attend, attend_state, explain, watching
from regard.describe.bias import Alibi, Bias, T5Bias, TensorBias
from regard.describe.codec import Codec, Fp8, Int4, Int8
from regard.describe.feature import Elu1, Favor, Feature, Relu, Taylor
from regard.describe.mask import Mask, draw
from regard.describe.mask_by_rule import Causal, Dilated, Global, Lengths, Prefix, Window
from regard.describe.mask_by_table import Blocks, Dense, Documents, Tree, Where
from regard.describe.position import Absolute, Learned, Position, Rope, Sinusoidal
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Scaling, Yarn
from regard.describe.score import Additive, Bilinear, Cosine, Dot, Epanechnikov, Gaussian, Laplacian, Score
from regard.describe.storage import Contiguous, Latent, Layout, Paged, Rolling, Stored
from regard.errors import ProblemError, RefusalError, RegardError, SlowWarning
from regard.linear.attend import linear_attend
from regard.nadaraya_watson import nadaraya_watson
from regard.plan.choose import Plan
from regard.shared_prefix import attend_shared
from regard.soft_dict import SoftDict
from regard.state import State
from regard.torch_signature import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "NTK",
    "Absolute",
    "Additive",
    "Alibi",
    "Bias",
    "Bilinear",
    "Blocks",
    "Call",
    "Causal",
    "Codec",
    "Contiguous",
    "Cosine",
    "Dense",
    "Dilated",
    "Documents",
    "Dot",
    "DynamicNTK",
    "Elu1",
    "Epanechnikov",
    "Favor",
    "Feature",
    "Fp8",
    "Gaussian",
    "Global",
    "Int4",
    "Int8",
    "Laplacian",
    "Latent",
    "Layout",
    "Learned",
    "Lengths",
    "Linear",
    "Llama3",
    "LongRope",
    "Mask",
    "Paged",
    "Plan",
    "Position",
    "Prefix",
    "ProblemError",
    "Proportional",
    "RefusalError",
    "RegardError",
    "Relu",
    "Rolling",
    "Rope",
    "Scaling",
    "Score",
    "Sinusoidal",
    "SlowWarning",
    "SoftDict",
    "State",
    "Stored",
    "T5Bias",
    "Taylor",
    "TensorBias",
    "Tree",
    "Where",
    "Window",
    "Yarn",
    "altering",
    "attend",
    "attend_shared",
    "attend_state",
    "draw",
    "explain",
    "linear_attend",
    "nadaraya_watson",
    "scaled_dot_product_attention",
    "watching",
]
