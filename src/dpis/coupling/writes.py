"""What a model keeps is released with it: nothing but a noisy step may write to it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor, nn

from dpis.batches import flattened
from dpis.coupling.model_parts import parts_of
from dpis.errors import CouplingError

SMALL = 1 << 16
"""Bytes. Up to here a copy takes less time than a digest, and no memory to speak of."""

Digest = tuple[bytes, ...]

Place = tuple[int, int, Digest]
"""Of a frozen parameter: its address, its version, and its digest where it is time to look closely."""

_GMAC = AESGCM(secrets.token_bytes(32))
_AT_ONCE = 1 << 30  # bytes: a tag covers less than 2**31


class ModelState:
    """Buffers and parameters of a module, trained or not, as they are now.

    Values are compared, not versions: writing to ``tensor.data`` leaves no other trace. Small tensors are copied, of
    others a digest is kept: no model is held twice. Frozen parameters may be many times the others, so of them place
    and version are kept, and where it is time to look closely a digest.

    Args:
        module: the model.
        closely: digest frozen parameters too.
        sharded: the parameters are gathered for a pass and freed after it, and with them what was written there; they
            are left alone.
    """

    def __init__(self, module: nn.Module, *, closely: bool, sharded: bool = False) -> None:
        self._module, self._closely, self._sharded = module, closely, sharded
        self._before = {
            name: self._place_of(tensor) if frozen else _value_of(tensor)
            for name, tensor, frozen in self._kept()
        }

    def check_unwritten(self) -> None:
        """Refuse to go on if one has another value now.

        Raises:
            CouplingError: if so.
        """
        missing = set(self._before)
        for name, tensor, frozen in self._kept():
            missing.discard(name)
            if name not in self._before or self._differs(tensor, frozen, self._before[name]):
                raise CouplingError(_WROTE.format(name))
        if missing:
            raise CouplingError(_WROTE.format(min(missing)))

    def _kept(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Every parameter and buffer, and whether it is a frozen parameter."""
        parts = parts_of(self._module)
        if not self._sharded:
            yield from ((name, p, not p.requires_grad) for name, p in parts.parameters.items())
        yield from ((name, buffer, False) for name, buffer in parts.buffers.items())

    def _differs(self, tensor: Tensor, frozen: bool, before: Tensor | Digest | Place) -> bool:
        if isinstance(before, Tensor):
            return frozen or not _same(tensor, before)
        return (self._place_of(tensor) if frozen else digest(tensor)) != before

    def _place_of(self, frozen: Tensor) -> Place:
        seen = digest(frozen) if self._closely else ()
        return frozen.data_ptr(), frozen._version, seen


@contextmanager
def unwritten(module: nn.Module, *, closely: bool = True, sharded: bool = False) -> Iterator[None]:
    """While records pass through a module: refuse whatever it wrote to itself.

    Raises:
        CouplingError: at the end, if it did.
    """
    state = ModelState(module, closely=closely, sharded=sharded)
    yield
    state.check_unwritten()


def digest(tensor: Tensor) -> Digest:
    """Equal for equal bytes of one type and shape; for others with a chance below ``2**-97``.

    It is a GMAC under a key of this process. Elsewhere than on the CPU it is made where the tensor is: sums of its
    words in 1,024 columns. Writes that cancel in every column are not seen there.
    """
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.device.type != "cpu":
        return kind, _column_sums(flattened(tensor)).cpu().numpy().tobytes()
    content = flattened(tensor).view(torch.uint8).numpy().data
    parts = range(0, len(content), _AT_ONCE)
    nonces = (number.to_bytes(12, "big") for number in range(len(parts)))
    places = zip(nonces, parts, strict=True)
    return kind, *(_GMAC.encrypt(n, b"", content[start : start + _AT_ONCE]) for n, start in places)


def _column_sums(numbers: Tensor, columns: int = 1024) -> Tensor:
    """Of the bytes as whole numbers of 64 bits, column by column; what is left over counts byte by byte."""
    content = numbers.view(torch.uint8)
    whole = content[: len(content) // (8 * columns) * 8 * columns]
    rest = content[len(whole) :].long()
    return torch.cat([whole.view(torch.int64).view(-1, columns).sum(0), rest])


def _value_of(tensor: Tensor) -> Tensor | Digest:
    small = tensor.layout is not torch.strided or tensor.nbytes <= SMALL
    return tensor.detach().clone() if small else digest(tensor)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


_WROTE = (
    "The model wrote to '{}' while records passed through it. That gets no noise: what it learns of records would be "
    "released with the model, and pass on to other records. Keep no running statistics (dpis.fix replaces those of "
    "torch's layers), start nothing from the first batch, and leave parameters to the optimizer. A cache that knows "
    "nothing of records (of positions, say) can be filled beforehand: run the model once on a made-up record of the "
    "greatest length"
)
