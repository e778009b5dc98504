"""Names under which private layers were imported before; torch's own layers do here.

Opacus needed layers of its own whose gradients it could take apart. This package takes torch's apart, so these
names are the layers of ``torch.nn``.
"""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import MultiheadAttention as DPMultiheadAttention

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
