"""Names under which private layers were imported before; torch's own layers do here.

Opacus needed layers of its own whose gradients it could take apart. This package takes torch's apart, so these are the
layers of ``torch.nn``. All they add: they load the weights of models that were saved with Opacus's layers.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]

SECOND_NAME = re.compile(r"l\d+(_reverse)?\.(ih|hh)\.(weight|bias)")
"""``l0.ih.weight``: in Opacus's models a second name for ``weight_ih_l0``, which torch has, too."""


class _Recurrent(nn.RNNBase):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in [n for n in state_dict if n.startswith(prefix)]:
            if SECOND_NAME.fullmatch(name.removeprefix(prefix)):
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)


class DPRNN(_Recurrent, nn.RNN):
    """`torch.nn.RNN`."""


class DPLSTM(_Recurrent, nn.LSTM):
    """`torch.nn.LSTM`."""


class DPGRU(_Recurrent, nn.GRU):
    """`torch.nn.GRU`."""


class DPMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`. Opacus's has three linear layers in place of one projection."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        def taken(*names: str) -> list[torch.Tensor]:
            return [state_dict.pop(prefix + n) for n in names if prefix + n in state_dict]

        if prefix + "qlinear.weight" in state_dict:
            weights = taken("qlinear.weight", "klinear.weight", "vlinear.weight")
            biases = taken("qlinear.bias", "klinear.bias", "vlinear.bias")
            found = {"in_proj_bias": torch.cat(biases)} if biases else {}
            if self._qkv_same_embed_dim:
                found["in_proj_weight"] = torch.cat(weights)
            else:
                found |= dict(
                    zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True)
                )
            for name in ("k", "v"):
                found |= {
                    f"bias_{name}": bias.view(1, 1, -1) for bias in taken(f"seq_bias_{name}.bias")
                }
            state_dict.update({prefix + name: value for name, value in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
