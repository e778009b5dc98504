"""Secret randomness: one key, and from it a cryptographic stream for every purpose and step.

Whoever can guess a coin or the noise of a step can undo the protection of that step, so both come from
AES-256 in counter mode under a key of the operating system, never from ``torch`` or ``numpy`` generators.
What step ``t`` draws is a function of ``(key, purpose, t)`` and of nothing that was drawn before: a run
that resumes at step ``t`` draws exactly what the unbroken run would have drawn.

**One purpose, one use.** Opening the stream of the same ``(purpose, step)`` twice gives the same numbers
again; the same noise added to two different sums cancels in their difference. Give every use a purpose
of its own. For the same reason a key serves one process: after a fork parent and child would draw the
same noise for different steps, so the child is refused.

**Floating point.** Numbers are rounded, and a mechanism proven for real numbers is only approximated
(Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012).
What is done: uniforms lie on a grid of ``2**52`` cells, so the probability of a coin is exact to ``2**-53``;
normals are made and added in float64, and every noisy sum is rounded to a public grid, about a millionth of the
noise's standard deviation apart, before anything else is done with it (`dpis.noise.on_grid`): whatever the type of
the parameters, what is released could have come from any of about ``2**30`` noises; the noise that is applied is
1.001 times the noise accounted for. What is not: a normal reaches at most ``sqrt(2 ln 2**53) = 8.57`` standard
deviations (beyond lies a mass of 1e-17); logarithm, sine and cosine carry their library's rounding, and
it may differ between machines; no discrete Gaussian is drawn. How long drawing takes is not hidden either.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpis.errors import InputError

KEY_BYTES = 32
MOST_BYTES = 1 << 40
"""Of one stream. Up to here it can be told from true randomness with an advantage below ``2**-56``."""

_CONTEXT = b"dpis/randomness/1:"
_FRACTION_BITS = 52
_ONE = np.uint64(0x3FF << _FRACTION_BITS)  # the bits of 1.0
_BELOW_ONE = 1.0 - 2.0**-53
_BLOCK = (
    1 << 17
)  # normals made at a time: they stay in the caches, and torch shares them among threads


@dataclass(frozen=True, repr=False)
class Key:
    """The secret of a run: 32 bytes. It is never shown, and belongs in no file that is released.

    Attributes:
        secret: the bytes, for a checkpoint that is itself a secret.
        seed: the number the key was made from, or None for a key of the operating system.

    Example:
        >>> key = Key.from_seed(7)
        >>> key
        Key(seeded)
        >>> key.stream("coins", step=3).uniforms(2) == key.stream("coins", step=3).uniforms(2)
        array([ True,  True])
    """

    secret: bytes = field(repr=False)
    seed: int | None = None
    _process: int = field(default_factory=os.getpid, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != KEY_BYTES:
            raise InputError(f"a key is {KEY_BYTES} secret bytes; Key.fresh() makes one")

    @classmethod
    def fresh(cls) -> Key:
        """A key from the operating system's generator: the only kind that protects anybody."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> Key:
        """The same key for the same number, for tests and research: whoever knows the seed knows the noise."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"a seed must be a whole number, found {seed!r}")
        return cls(hmac.digest(_CONTEXT, b"seed:%d" % seed, "sha256"), seed)

    @property
    def seeded(self) -> bool:
        """Whether the key can be guessed; what is made with it is not for release."""
        return self.seed is not None

    @property
    def at_home(self) -> bool:
        """Whether this is the process that made the key, not a fork of it."""
        return os.getpid() == self._process

    def require_home(self) -> None:
        """Refuse every process but the one that made the key.

        Raises:
            InputError: with what to do instead.
        """
        if not self.at_home:
            raise InputError(
                f"coins and noise are drawn in the process that made the key ({self._process}) alone, found its copy "
                f"in process {os.getpid()}: processes that share a key draw the same noise, which cancels in the "
                "difference of what they release and leaves bare data. Call make_private, or dpis.train, inside the "
                "process that trains; each run then spends a budget of its own. Nothing was released"
            )

    def stream(self, purpose: str, step: int) -> Stream:
        """The randomness of one purpose at one step, from its beginning.

        Every stream has a key of its own, ``HMAC-SHA256(secret, step, purpose)``, so streams do not
        overlap however long they are.

        Args:
            purpose: what for, in a word: "coins", "noise". Each use needs a word of its own.
            step: a whole number in ``[0, 2**64)``.
        """
        self.require_home()
        if not purpose:
            raise InputError("a stream needs a purpose, such as 'coins' or 'noise'")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 64:
            raise InputError(f"step must be a whole number from 0 to 2**64 - 1, found {step!r}")
        message = _CONTEXT + step.to_bytes(8, "big") + purpose.encode()
        return Stream(hmac.digest(self.secret, message, "sha256"))

    def __repr__(self) -> str:
        return "Key(seeded)" if self.seeded else "Key(secret)"


class Stream:
    """Reads one stream from front to back; every number is used once.

    Args:
        key: 32 bytes that key no other stream. Take streams from `Key.stream`.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher: Any = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._read = 0

    @classmethod
    def derived(cls, secret: bytes, purpose: bytes) -> Stream:
        """A stream of its own for every purpose, from secret bytes that serve nothing else."""
        return cls(hmac.digest(secret, _CONTEXT + purpose, "sha256"))

    def bytes(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        return self._next(count).tobytes()

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """The next ``count`` numbers, uniform on the centres of ``2**52`` equal cells of (0, 1).

        Neither 0 nor 1 occurs: the least is ``2**-53`` and the greatest ``1 - 2**-53``.
        """
        words = self._next(8 * count).view("<u8")
        words >>= np.uint64(64 - _FRACTION_BITS)
        words |= _ONE
        numbers: npt.NDArray[np.float64] = words.view(np.float64)  # 1 + cell / 2**52 ...
        numbers -= _BELOW_ONE  # ... exactly: the centre of the cell
        return numbers

    def normals(self, count: int) -> Tensor:
        """``count`` standard normals in float64, on the CPU, by the method of Box and Muller.

        ``sqrt(-2 ln u) (cos 2πv, sin 2πv)`` for uniforms ``u``, ``v``. Reads an even number of uniforms.
        """
        if count < 0:
            raise InputError(f"how many must be a whole number >= 0, found {count}")
        normals = torch.empty(count + count % 2, dtype=torch.float64)
        for block in torch.split(normals, _BLOCK):
            self._fill_with_normals(block)
        return normals[:count]

    def _fill_with_normals(self, block: Tensor) -> None:
        pairs = len(block) // 2
        uniforms = torch.from_numpy(self.uniforms(2 * pairs))
        radius = uniforms[:pairs].log_().mul_(-2.0).sqrt_()
        angle = uniforms[pairs:].mul_(2.0 * math.pi)
        torch.cos(angle, out=block[:pairs]).mul_(radius)
        torch.sin(angle, out=block[pairs:]).mul_(radius)

    def _next(self, count: int) -> npt.NDArray[np.uint8]:
        if count < 0:
            raise InputError(f"how many must be a whole number >= 0, found {count}")
        self._read += count
        if self._read > MOST_BYTES:
            raise InputError(f"one stream gives at most {MOST_BYTES} bytes; take another purpose")
        buffer = np.empty(count + 15, dtype=np.uint8)  # the cipher may ask for room for a block
        if count:
            self._cipher.update_into(bytes(count), buffer)
        return buffer[:count]
