"""Secret randomness: one key, and from it a cryptographic stream for every purpose and step.

Whoever can guess a coin or the noise of a step can undo the protection of that step, so both come from
AES-256 in counter mode under a key of the operating system, never from ``torch`` or ``numpy`` generators.
What step ``t`` draws is a function of ``(key, purpose, t)`` and of nothing that was drawn before: a run
that resumes at step ``t`` draws exactly what the unbroken run would have drawn.

**One purpose, one use.** Opening the stream of the same ``(purpose, step)`` twice gives the same numbers
again; the same noise added to two different sums cancels in their difference. Give every use a purpose
of its own. For the same reason a key serves one process: after a fork parent and child would draw the
same noise for different steps, so the child is refused.

**Noise by position.** The noise of a step is not read from front to back: a normal is a function of
``(key, purpose, step, position)``, so any slice can be made alone, by any thread or process, and slices fit together
(`Normals`). Nothing is used twice: purpose and step make the key of a cipher (HMAC-SHA256: no two alike), and the
position makes its counter, a block of 128 bits for every two normals: the upper 96 bits count tiles of 2**15 normals,
the lower 32 the blocks of a tile. The tensors of a step lie one behind the other in one vector
(`dpis.noise.layout`), so that no two of them share a position.

**Coins by shard.** The coins of a step are a function of ``(key, purpose, step, shard, position)``, so every process
tosses those of its own shards, and all processes together toss what one alone would (`Coins`). Nothing is used twice:
purpose and step make the key of a cipher, as above, and the block that two coins are made from, one of each half,
consists of shard and position, 64 bits each. A shard's position only goes forward.

**Floating point.** Numbers are rounded, and a mechanism proven for real numbers is only approximated
(Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012). What is done:

- Uniforms lie on a grid of ``2**52`` cells, so the probability of a coin is exact to ``2**-53``.
- Normals are made and added in float64, by the method of Box and Muller: two of them are a radius
  ``sqrt(-2 ln u)`` times cosine and sine of an angle. (Both come from the tangent of half the angle, to a few units of
  ``2**-53`` of the radius: one function instead of two.) Here ``u`` has 63 bits and the resolution of floating point:
  it is a multiple of ``2**-64`` however small it is, where the tails are made. A radius ends at
  ``sqrt(2 ln 2**64) = 9.42`` standard deviations (beyond lies a mass of ``2**-64``), and the possible radii lie closer
  than the grid below but for a mass of ``2**-45`` in the tail. Angles lie ``2**-51`` apart at most.
- Every noisy sum is rounded to a public grid, about a millionth of the noise's standard deviation apart, before
  anything else is done with it (`dpis.noise.on_grid`): whatever the type of the parameters, what is released could
  have come from any of about ``2**30`` noises.
- The noise that is applied is 1.001 times the noise accounted for.

What is not: logarithm and tangent carry their library's rounding, and it may differ between machines; no discrete
Gaussian is drawn. How long drawing takes is not hidden either.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
from collections.abc import Iterator
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

TILE = 1 << 15
"""Normals that are made at a time: all that is needed for them stays in a core's cache, and calls are few."""

_ZEROS = memoryview(bytes(8 * TILE))
_AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()


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
        return Stream(self._derived(purpose, step))

    def coins(self, purpose: str, step: int) -> Coins:
        """The coins of all shards for one purpose at one step, from their beginning.

        Args:
            purpose: what for, in a word. A stream of the same word has nothing to do with it.
            step: a whole number in ``[0, 2**64)``.
        """
        return Coins(self._derived(f"coins:{purpose}" if purpose else "", step))

    def normals(self, purpose: str, step: int, count: int) -> Normals:
        """A vector of standard normals for one purpose at one step.

        Args:
            purpose: what for, in a word. A stream of the same word has nothing to do with it.
            step: a whole number in ``[0, 2**64)``.
            count: how long the vector is.
        """
        return Normals(self._derived(f"normals:{purpose}" if purpose else "", step), count)

    def _derived(self, purpose: str, step: int) -> bytes:
        self.require_home()
        if not purpose:
            raise InputError("a stream needs a purpose, such as 'coins' or 'noise'")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 64:
            raise InputError(f"step must be a whole number from 0 to 2**64 - 1, found {step!r}")
        message = _CONTEXT + step.to_bytes(8, "big") + purpose.encode()
        return hmac.digest(self.secret, message, "sha256")

    def __repr__(self) -> str:
        return "Key(seeded)" if self.seeded else "Key(secret)"


class Stream:
    """Reads one stream from front to back; every number is used once.

    Args:
        key: 32 bytes that key no other stream. Take streams from `Key.stream`.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)
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
        return _centres(self._next(8 * count).view("<u8"))

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


class Coins:
    """Uniform numbers for the coins of many shards, in pairs; every pair is used once.

    A pair is made from one block of the cipher, which consists of its shard and its position in it, 64 bits each. What
    a shard gives does not depend on which others are asked with it, nor on how reading is cut.

    Args:
        key: 32 bytes that key nothing else. Take coins from `Key.coins`.

    Example:
        >>> coins, others = (Key.from_seed(7).coins("draw", step=3) for _ in range(2))
        >>> coins.take(np.array([4, 9]), np.array([2, 1]))[2] == others.take(np.array([9]), np.array([1]))
        array([ True])
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = _block_cipher(key)
        self._positions = np.zeros(0, dtype=np.int64)  # the next one of every shard
        self._read = 0

    def take(
        self, shards: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """As `pairs`, where one number is enough: the first."""
        return self.pairs(shards, counts)[:, 0]

    def pairs(
        self, shards: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """The next ``counts[j]`` pairs of every ``shards[j]``, one shard after another: a row each.

        They lie on the grid of `Stream.uniforms`.

        Args:
            shards: ascending, each once.
            counts: how many of each, from 0.
        """
        if len(shards) and (shards[0] < 0 or (shards[1:] <= shards[:-1]).any()):
            raise InputError("shards must ascend, from 0 on, each named once")
        if len(counts) != len(shards) or (counts < 0).any():
            raise InputError("how many must be a whole number >= 0 for every shard")
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        self._read += 16 * total
        if self._read > MOST_BYTES:
            raise InputError(f"coins take at most {MOST_BYTES} bytes; take another purpose")
        blocks = np.empty((total, 2), dtype="<u8")
        blocks[:, 0] = shards.repeat(counts)
        blocks[:, 1] = (self._forward(shards, counts) - ends).repeat(counts) + np.arange(total)
        buffer = np.empty(16 * total + 15, dtype=np.uint8)  # the cipher may want another block
        self._cipher.update_into(blocks.view(np.uint8), buffer)
        return _centres(buffer[: 16 * total].view("<u8")).reshape(total, 2)

    def _forward(
        self, shards: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Move the positions of shards by so many; where they are then."""
        if len(shards) and shards[-1] >= len(self._positions):
            known, self._positions = self._positions, np.zeros(int(shards[-1]) + 1, dtype=np.int64)
            self._positions[: len(known)] = known
        positions = self._positions[shards] + counts
        self._positions[shards] = positions
        return positions


class Normals:
    """A vector of standard normals in float64, on the CPU, of which any slice can be made alone.

    It is made in tiles. Tile ``t`` takes the blocks of the cipher from ``first_block(t)`` on, one for every two
    normals, and reads them as whole numbers of 64 bits: the first half make radii, the others angles. Half of the tile
    are ``radius · cos(angle)``, the rest ``radius · sin(angle)``. The last tile is as long as what is left.

    Args:
        key: 32 bytes that key nothing else. Take normals from `Key.normals`.
        count: how long the vector is.

    Example:
        >>> normals = Key.from_seed(7).normals("noise", step=3, count=100_000)
        >>> torch.equal(normals[70_000:70_005], normals[:][70_000:70_005])
        True
    """

    def __init__(self, key: bytes, count: int) -> None:
        if not 0 <= 8 * count <= MOST_BYTES:
            raise InputError(f"from 0 to {MOST_BYTES // 8} normals are required, found {count}")
        self._key, self._count = key, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Tensor:
        """These, in a tensor of their own."""
        start, stop, _ = place.indices(self._count)
        normals = torch.empty(max(stop - start, 0), dtype=torch.float64)
        first = start // TILE
        for number, tile in enumerate(self.tiles(first, -(-stop // TILE)), first):
            begin = number * TILE
            own = tile[max(start - begin, 0) : stop - begin]
            normals[max(begin - start, 0) :][: len(own)] = own
        return normals

    def tiles(self, first: int, last: int) -> Iterator[Tensor]:
        """The tiles from ``first`` to before ``last``; each is overwritten when the next is asked for."""
        room = min(TILE, self._count + self._count % 2)
        random = np.empty(8 * room + 15, dtype=np.uint8)  # the cipher may ask for room for a block
        numbers, normals = torch.empty(2, room, dtype=torch.float64).numpy()
        for tile in range(first, min(last, -(-self._count // TILE))):
            size = min(TILE, self._count - tile * TILE)
            even = size + size % 2
            _cipher(self._key, first_block(tile)).update_into(_ZEROS[: 8 * even], random)
            _box_muller(random[: 8 * even].view("<i8"), numbers[:even], normals[:even])
            yield torch.from_numpy(normals[:size])


def _centres(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """From random words to the centres of ``2**52`` cells of (0, 1), in place."""
    words >>= np.uint64(64 - _FRACTION_BITS)
    words |= _ONE
    numbers: npt.NDArray[np.float64] = words.view(np.float64)  # 1 + cell / 2**52 ...
    numbers -= _BELOW_ONE  # ... exactly: the centre of the cell
    return numbers


Array = npt.NDArray[np.float64]


def _box_muller(words: npt.NDArray[np.int64], numbers: Array, normals: Array) -> None:
    """From words of 64 random bits with a sign: ``u = |word + 1/2| / 2**63`` and an angle between -π and π.

    With ``t`` the tangent of half the angle, ``1 + cos = 2 / (1 + t²)`` and ``sin = t (1 + cos)``.
    """
    np.copyto(numbers, words)
    pairs = len(words) // 2
    radius, t = numbers[:pairs], numbers[pairs:]
    by_cosine, by_sine = normals[:pairs], normals[pairs:]
    radius += 0.5
    np.abs(radius, out=radius)
    radius *= 2.0**-63
    _in_place(np.log, torch.log, radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    t *= math.pi * 2.0**-64
    _in_place(np.tan, torch.tan, t)
    np.multiply(t, t, out=by_sine)
    by_sine += 1.0
    np.divide(radius, by_sine, out=by_cosine)
    by_cosine *= 2.0
    np.multiply(t, by_cosine, out=by_sine)
    by_cosine -= radius


def _in_place(by_numpy: Any, by_torch: Any, numbers: Array) -> None:
    """By whoever has it in vectors: numpy with AVX-512, torch elsewhere."""
    if _AVX512:
        by_numpy(numbers, out=numbers)
    else:
        values = torch.from_numpy(numbers)
        by_torch(values, out=values)


def first_block(tile: int) -> int:
    """Where a tile begins in the stream of its cipher."""
    return (tile << 32) + _FIRST


_FIRST = 2
"""With this counter the mode of Galois begins to encrypt."""


def _cipher(key: bytes, block: int = 0) -> Any:
    """AES-256 in counter mode, from this block of its stream on.

    The mode of Galois encrypts in counter mode, and makes a tag that nobody asks for. OpenSSL has it in wider vectors,
    which makes it more than twice as fast.
    """
    whole = block.to_bytes(16, "big")
    mode = modes.GCM(whole[:12]) if block % (1 << 32) == _FIRST else modes.CTR(whole)
    return Cipher(algorithms.AES(key), mode).encryptor()


def _block_cipher(key: bytes) -> Any:
    """AES-256 of single blocks: a function of 128 bits that nobody can tell from a random one without the key."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()
