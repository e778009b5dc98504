"""Streams: an independent AES oracle, laws of numbers, and tests of distribution that can fail.

Seeds are fixed. Every test of distribution would reject a true sample with probability below 1e-6.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import math
import os
import pickle
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpis import randomness
from dpis.errors import InputError
from dpis.generators import GeneratorStates
from dpis.randomness import TILE, Coins, Key, Normals, Stream
from tests.forks import error_in_a_fork, needs_fork
from tests.mechanism.systems import recorded_ciphers, shared_blocks

FALSE_ALARM = 1e-6
KEY = Key.from_seed(20220)


def counter_mode(secret: bytes, purpose: str, step: int, count: int, first: int = 0) -> bytes:
    """The stream block by block, from the block cipher alone."""
    message = b"dpis/randomness/1:" + step.to_bytes(8, "big") + purpose.encode()
    key = hmac.new(secret, message, hashlib.sha256).digest()
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    blocks = [cipher.update((first + i).to_bytes(16, "big")) for i in range(-(-count // 16))]
    return b"".join(blocks)[:count]


@pytest.mark.parametrize(("purpose", "step"), [("coins", 0), ("noise", 3), ("ü", 2**64 - 1)])
def test_the_stream_is_aes_in_counter_mode(purpose: str, step: int) -> None:
    assert KEY.stream(purpose, step).bytes(100) == counter_mode(KEY.secret, purpose, step, 100)


def words(purpose: str, step: int, count: int, first: int = 0, signed: bool = False) -> list[int]:
    """The stream as whole numbers of 64 bits, the least byte first."""
    stream = counter_mode(KEY.secret, purpose, step, 8 * count, first)
    each = (stream[i : i + 8] for i in range(0, len(stream), 8))
    return [int.from_bytes(word, "little", signed=signed) for word in each]


def law_uniforms_are_the_cells_that_the_stream_names() -> None:
    expected = [((word >> 12) + 0.5) / 2**52 for word in words("coins", 7, 40)]
    assert KEY.stream("coins", 7).uniforms(40).tolist() == expected


def law_normals_are_made_of_their_blocks() -> None:
    """By Box and Muller, computed here from the block cipher alone: the last tile, of nine."""
    first = 3 * 2**32 + 2
    numbers = words("normals:noise", 2**40, 10, first, signed=True)
    u, angle = (
        [abs(w + 0.5) / 2**63 for w in numbers[:5]],
        [math.pi * w / 2**63 for w in numbers[5:]],
    )
    radius = [math.sqrt(-2 * math.log(a)) for a in u]
    waves = [[wave(v) for v in angle] for wave in (math.cos, math.sin)]
    expected = [r * w for wave in waves for r, w in zip(radius, wave, strict=True)]
    drawn = KEY.normals("noise", 2**40, 3 * TILE + 9)[3 * TILE :].tolist()
    assert drawn == pytest.approx(expected[:9], rel=1e-12, abs=1e-14)


def coins_by_hand(purpose: str, step: int, shard: int, position: int) -> list[float]:
    """One pair, from the block cipher alone."""
    message = b"dpis/randomness/1:" + step.to_bytes(8, "big") + f"coins:{purpose}".encode()
    key = hmac.new(KEY.secret, message, hashlib.sha256).digest()
    block = shard.to_bytes(8, "little") + position.to_bytes(8, "little")
    made = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)
    words = (int.from_bytes(made[i : i + 8], "little") for i in (0, 8))
    return [((word >> 12) + 0.5) / 2**52 for word in words]


def numbers_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def law_coins_are_the_cells_that_their_blocks_name() -> None:
    """A function of key, purpose, step, shard and position, whichever shards are asked with it."""
    for step in (0, 2**40):
        coins = KEY.coins("draw", step)
        read = {3: 0, 7: 0, 60_000: 0}
        for shards, counts in (
            ((3,), (2,)),
            ((3, 60_000), (1, 3)),
            ((7, 60_000), (0, 1)),
            ((3, 7), (4, 4)),
        ):
            pairs = coins.pairs(numbers_of(*shards), numbers_of(*counts)).tolist()
            for shard, count in zip(shards, counts, strict=True):
                for position in range(read[shard], read[shard] + count):
                    assert pairs.pop(0) == coins_by_hand("draw", step, shard, position)
                read[shard] += count
            assert not pairs


def law_a_slice_is_the_slice_of_the_whole() -> None:
    """Bit for bit, wherever it is cut."""
    for count in (1, 2, 7, TILE, TILE + 1, 3 * TILE + 777):
        normals = KEY.normals("noise", 4, count)
        whole = normals[:]
        assert whole.shape == (count,)
        assert whole.dtype == torch.float64
        assert len(whole.unique()) == count
        for start in {0, count // 3, TILE - 1, TILE, count - 1}:
            for stop in {0, start + 1, 2 * TILE, count - 3, count}:
                assert torch.equal(normals[start:stop], whole[start:stop])


def law_no_block_is_read_twice() -> None:
    """By slices of several vectors and streams: of no cipher, that is of no purpose and step."""
    with recorded_ciphers() as opened:
        for purpose, step in itertools.product(("noise", "coins", "release"), (0, 1, 2**40)):
            KEY.stream(purpose, step).bytes(1000)
            coins = KEY.coins(purpose, step)
            for shards in ((0, 1, 2, 40), (1, 2), (40, 41)):
                coins.pairs(numbers_of(*shards), numbers_of(*shards) + 3)
            normals = KEY.normals(purpose, step, 3 * TILE)
            for tile in range(3):
                normals[tile * TILE : (tile + 1) * TILE]
    read_as_coins = 16 * ((0 + 1 + 2 + 40 + 4 * 3) + (1 + 2 + 2 * 3) + (40 + 41 + 2 * 3))
    assert sum(one.read for one in opened) == 9 * (1000 + 8 * 3 * TILE + read_as_coins)
    assert not shared_blocks(opened)


def law_a_fresh_key_is_what_the_operating_system_gave() -> None:
    """Whole, and asked anew for each."""
    given: list[bytes] = []

    def heard(real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def ask(count: int) -> bytes:
            given.append(real(count))
            return given[-1]

        return ask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", heard(secrets.token_bytes))
        patch.setattr(os, "urandom", heard(os.urandom))
        keys = [Key.fresh(), Key.fresh()]
    assert all(key.secret in given for key in keys)
    assert keys[0].secret != keys[1].secret


def law_no_generator_of_the_process_moves_or_is_asked() -> None:
    """Those of torch, numpy and Python: set to the same place, they give two keys, and they stay there."""
    fresh, seeded = [], []
    for _ in range(2):
        with GeneratorStates.now().again():
            torch.manual_seed(5)
            np.random.seed(5)
            random.seed(5)
            before = torch.get_rng_state(), np.random.get_state()[1:3], random.getstate()
            for key, numbers in ((Key.fresh(), fresh), (KEY, seeded)):
                numbers += [*key.normals("noise", 0, 4)[:], *key.stream("coins", 0).uniforms(4)]
            assert torch.equal(torch.get_rng_state(), before[0])
            assert str(np.random.get_state()[1:3]) == str(before[1])
            assert random.getstate() == before[2]
    assert len({float(number) for number in fresh}) == 16
    assert len({float(number) for number in seeded}) == 8


LAWS = {name: law for name, law in vars().items() if name.startswith("law_")}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_law(law: Callable[[], None]) -> None:
    law()


def of_a_twister(self: Normals, first: int, last: int) -> Iterator[torch.Tensor]:
    generator = np.random.RandomState(np.frombuffer(self._key, np.uint32))
    normals = torch.from_numpy(generator.normal(size=len(self)))
    return iter(normals.split(TILE)[first:last])


def of_torch(self: Normals, first: int, last: int) -> Iterator[torch.Tensor]:
    return iter(torch.randn(len(self), dtype=torch.float64).split(TILE)[first:last])


def from_the_first_block(key: bytes, block: int = 0, _real: Any = randomness._cipher) -> Any:
    return _real(key, 0)


def without_the_step(self: Key, purpose: str, step: int, _real: Any = Key._derived) -> bytes:
    return _real(self, purpose, 0)


def without_the_purpose(self: Key, purpose: str, step: int, _real: Any = Key._derived) -> bytes:
    return _real(self, "noise", step)


def of_half_a_tile(self: Normals, first: int, last: int, _real: Any = Normals.tiles) -> Any:
    """Tiles that begin where the half of the one before ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "first_block", lambda tile: tile * TILE // 4)
        return iter([tile.clone() for tile in _real(self, first, last)])


def without_the_shard(key: bytes, _real: Any = randomness._block_cipher) -> Any:
    class Blind:
        cipher = _real(key)

        def update_into(self, blocks: np.ndarray, buffer: np.ndarray) -> int:
            blocks.view("<u8")[:, 0] = 0
            return self.cipher.update_into(blocks, buffer)

    return Blind()


def from_the_first_position(self: Coins, shards: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return counts


PLANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "a key of Python's generator": (
        Key, "fresh", lambda: Key(random.randbytes(32)), law_a_fresh_key_is_what_the_operating_system_gave,
    ),
    "a key of a generator that the operating system seeded": (
        Key, "fresh", lambda: Key(random.Random(secrets.token_bytes(16)).randbytes(32)),
        law_a_fresh_key_is_what_the_operating_system_gave,
    ),
    "a key of torch's generator": (
        Key, "fresh", lambda: Key(bytes(torch.randint(256, (32,)).tolist())),
        law_no_generator_of_the_process_moves_or_is_asked,
    ),
    "a key of the clock": (
        Key, "fresh", lambda: Key(hashlib.sha256(str(time.time_ns()).encode()).digest()),
        law_a_fresh_key_is_what_the_operating_system_gave,
    ),
    "normals of a twister that the key seeds": (
        Normals, "tiles", of_a_twister, law_normals_are_made_of_their_blocks,
    ),
    "normals of torch": (Normals, "tiles", of_torch, law_no_generator_of_the_process_moves_or_is_asked),
    "every slice begins its cipher anew": (
        randomness, "_cipher", from_the_first_block, law_a_slice_is_the_slice_of_the_whole,
    ),
    "slices overlap": (Normals, "tiles", of_half_a_tile, law_no_block_is_read_twice),
    "steps share a key": (Key, "_derived", without_the_step, law_no_block_is_read_twice),
    "purposes share a key": (Key, "_derived", without_the_purpose, law_no_block_is_read_twice),
    "all shards have the same coins": (
        randomness, "_block_cipher", without_the_shard, law_coins_are_the_cells_that_their_blocks_name,
    ),
    "coins are read from the beginning again": (
        Coins, "_forward", from_the_first_position, law_no_block_is_read_twice,
    ),
    "coins share the key of a stream": (
        Key, "coins", lambda self, purpose, step: Coins(self._derived(purpose, step)), law_no_block_is_read_twice,
    ),
    "coins of 32 bits": (
        Stream, "uniforms", lambda self, count: (np.frombuffer(self.bytes(4 * count), "<u4") + 0.5) / 2**32,
        law_uniforms_are_the_cells_that_the_stream_names,
    ),
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, bug, law = PLANTS[plant]
    monkeypatch.setattr(target, name, bug)
    with pytest.raises(AssertionError):
        law()


@given(st.lists(st.integers(0, 50), max_size=10))
def test_reading_in_parts_reads_the_same(parts: list[int]) -> None:
    stream = KEY.stream("rows", 1)
    assert b"".join(stream.bytes(n) for n in parts) == KEY.stream("rows", 1).bytes(sum(parts))


def test_streams_are_reproducible_and_no_two_are_alike() -> None:
    keys = [KEY, Key.from_seed(20221), Key.from_seed(-20220), Key.fresh(), Key.fresh()]
    purposes = ["coins", "accept", "noise", "split", "augment", "rows", "coins1", "1coins"]
    steps = [0, 1, 2, 256, 2**32, 2**64 - 1]
    every = list(itertools.product(keys, purposes, steps))
    starts = [key.stream(purpose, step).bytes(16) for key, purpose, step in every]
    assert starts == [key.stream(purpose, step).bytes(16) for key, purpose, step in every]
    assert len(set(starts)) == len(every)


def test_a_key_does_not_show_its_secret() -> None:
    for key in (Key.fresh(), Key.from_seed(1)):
        shown = repr(key) + str(key) + f"{key}" + repr(key.stream("coins", 0))
        assert key.secret.hex() not in shown
        assert repr(key.secret)[2:-1] not in shown


def test_a_seeded_key_says_so() -> None:
    assert KEY.seeded
    assert KEY.seed == 20220
    assert not Key.fresh().seeded
    assert Key.fresh().seed is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Key(b"short"),
        lambda: Key("x" * 32),  # type: ignore[arg-type]
        lambda: Key.from_seed(True),
        lambda: Key.from_seed(1.0),  # type: ignore[arg-type]
        lambda: KEY.stream("", 0),
        lambda: KEY.stream("coins", -1),
        lambda: KEY.stream("coins", 2**64),
        lambda: KEY.stream("coins", True),
        lambda: KEY.stream("coins", 1.0),  # type: ignore[arg-type]
        lambda: KEY.stream("coins", 0).uniforms(-1),
        lambda: KEY.coins("", 0),
        lambda: KEY.coins("draw", -1),
        lambda: KEY.coins("draw", 0).take(numbers_of(1, 1), numbers_of(1, 1)),
        lambda: KEY.coins("draw", 0).take(numbers_of(2, 1), numbers_of(1, 1)),
        lambda: KEY.coins("draw", 0).take(numbers_of(-1), numbers_of(1)),
        lambda: KEY.coins("draw", 0).take(numbers_of(1), numbers_of(-1)),
        lambda: KEY.coins("draw", 0).take(numbers_of(1), numbers_of(1, 1)),
        lambda: KEY.normals("", 0, 1),
        lambda: KEY.normals("noise", -1, 1),
        lambda: KEY.normals("noise", 0, -1),
        lambda: KEY.normals("noise", 0, 2**37 + 1),
    ],
)
def test_wrong_requests_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        wrong()


@needs_fork
def test_a_key_serves_the_process_that_made_it() -> None:
    key = Key.fresh()
    said = error_in_a_fork(lambda: key.stream("noise", 0))
    assert said.startswith("InputError")
    assert "cancel" in said
    assert "inside the process" in said
    restored = pickle.dumps(key)
    assert "cancel" in error_in_a_fork(lambda: pickle.loads(restored).stream("noise", 0))
    key.stream("noise", 0)  # the parent goes on


@needs_fork
def test_a_key_that_is_made_or_restored_in_a_child_serves_there() -> None:
    secret = Key.fresh().secret
    assert not error_in_a_fork(lambda: Key.fresh().stream("noise", 0))
    assert not error_in_a_fork(lambda: Key(secret).stream("noise", 0))


def test_a_stream_ends_before_it_could_be_told_from_randomness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(randomness, "MOST_BYTES", 64)
    stream = KEY.stream("noise", 0)
    stream.bytes(64)
    with pytest.raises(InputError, match="another purpose"):
        stream.bytes(1)
    coins = KEY.coins("draw", 0)
    coins.take(numbers_of(1, 9), numbers_of(3, 1))
    with pytest.raises(InputError, match="another purpose"):
        coins.take(numbers_of(5), numbers_of(1))


# ── uniforms ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("byte", "expected"), [(0x00, 2.0**-53), (0xFF, 1 - 2.0**-53)])
def test_the_extremes_of_a_uniform_are_inside(
    byte: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "_next", lambda _, count: np.full(count, byte, dtype=np.uint8))
    stream = KEY.stream("coins", 0)
    assert stream.uniforms(3).tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("word", "radius"),
    [
        (0, math.sqrt(2 * math.log(2**64))),  # the tail
        (-1, math.sqrt(2 * math.log(2**64))),
        (1, math.sqrt(2 * math.log(2**64 / 3))),  # and its next point
        (2**62, math.sqrt(2 * math.log(2))),
        (2**63 - 1, 0.0),
        (-(2**63), 0.0),
    ],
)
def test_the_radius_of_a_word(word: int, radius: float) -> None:
    """The tail has all of its 63 bits, and no word makes an infinite number."""
    made = np.empty((2, 2))
    randomness._box_muller(np.array([word, 0]), *made)
    assert made[1].tolist() == pytest.approx([radius, 0.0], rel=1e-15)


def test_uniforms_are_centres_of_cells() -> None:
    numerators = KEY.stream("coins", 0).uniforms(10_000) * 2.0**53
    assert (numerators % 2 == 1).all()


@given(st.lists(st.integers(0, 20), max_size=5))
def test_uniforms_in_parts_are_the_same(parts: list[int]) -> None:
    stream, whole = KEY.stream("coins", 5), KEY.stream("coins", 5).uniforms(sum(parts))
    assert [u for n in parts for u in stream.uniforms(n)] == whole.tolist()


parts_of_shards = st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), max_size=5)


@given(parts_of_shards)
def test_coins_of_a_shard_do_not_depend_on_how_they_are_read(parts: list[list[int]]) -> None:
    together, shards = KEY.coins("draw", 5), numbers_of(0, 2, 3, 11)
    found: dict[int, list[float]] = {shard: [] for shard in shards.tolist()}
    for counts in parts:
        taken = together.take(shards, numbers_of(*counts)).tolist()
        for shard, count in zip(found, counts, strict=True):
            found[shard] += [taken.pop(0) for _ in range(count)]
    for shard, own in found.items():
        alone = KEY.coins("draw", 5).take(numbers_of(shard), numbers_of(len(own)))
        assert own == alone.tolist()


def test_coins_are_uniform() -> None:
    """Within a shard, over the shards at one position, and within the pairs."""
    pairs = KEY.coins("draw", 0).pairs(np.arange(250), np.full(250, 400)).reshape(250, 400, 2)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    for sample in (first, first.T, second, pairs):
        accept_uniforms(sample.ravel())
    score = 12 * ((first - 0.5) * (second - 0.5)).mean() * first.size**0.5
    assert abs(score) < stats.norm.isf(FALSE_ALARM / 2)


def accept_uniforms(sample: np.ndarray) -> None:
    counts = np.histogram(sample, bins=256, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    assert stats.kstest(sample, "uniform").pvalue > FALSE_ALARM
    assert abs(lag_one(sample)) < stats.norm.isf(FALSE_ALARM / 2)


def lag_one(sample: np.ndarray) -> float:
    """Standard normal if the sample is independent."""
    scaled = (sample - sample.mean()) / sample.std()
    return float((scaled[1:] * scaled[:-1]).sum() / len(scaled) ** 0.5)


def test_uniforms_are_uniform() -> None:
    accept_uniforms(KEY.stream("coins", 0).uniforms(100_000))
    with pytest.raises(AssertionError):
        accept_uniforms(KEY.stream("coins", 0).uniforms(100_000) ** 1.05)
    with pytest.raises(AssertionError):
        accept_uniforms(np.repeat(KEY.stream("coins", 0).uniforms(50_000), 2))


# ── normals ──────────────────────────────────────────────────────────────────────────────────────────


def accept_normals(sample: np.ndarray) -> None:
    edges = stats.norm.ppf(np.linspace(0, 1, 201))
    counts = np.histogram(sample, bins=edges)[0]
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    assert stats.kstest(sample, "norm").pvalue > FALSE_ALARM
    squares = stats.chi2(len(sample)).cdf((sample**2).sum())
    assert FALSE_ALARM / 2 < squares < 1 - FALSE_ALARM / 2


def accept_pairs(sample: np.ndarray) -> None:
    """The two halves of a tile belong together, by Box and Muller; they must not show it."""
    tiles = sample[: len(sample) // TILE * TILE].reshape(-1, 2, TILE // 2)
    first, second = tiles[:, 0].ravel(), tiles[:, 1].ravel()
    for left, right in ((first, second), (first**2 - 1, second**2 - 1), (first, second**2 - 1)):
        score = (left * right).mean() / (left * right).std() * len(left) ** 0.5
        assert abs(score) < stats.norm.isf(FALSE_ALARM / 2)


def test_normals_are_normal() -> None:
    sample = KEY.normals("noise", 0, 100_000)[:].numpy()
    accept_normals(sample)
    accept_pairs(sample)
    assert abs(lag_one(sample)) < stats.norm.isf(FALSE_ALARM / 2)


@pytest.mark.parametrize(
    "broken",
    [
        lambda normals: normals * 2 / 3,
        lambda normals: normals * 3 / 2,
        lambda normals: normals + 0.05,
        lambda normals: np.clip(normals, -2.5, 2.5),
        lambda normals: np.sign(normals) * np.abs(normals) ** 1.1,
    ],
)
def test_what_is_not_standard_normal_is_rejected(
    broken: Callable[[np.ndarray], np.ndarray],
) -> None:
    with pytest.raises(AssertionError):
        accept_normals(broken(KEY.normals("noise", 0, 100_000)[:].numpy()))


def test_halves_of_equal_size_are_rejected() -> None:
    tiles = KEY.normals("noise", 0, 6 * TILE)[:].numpy().reshape(6, 2, -1)
    tiles[:, 1] = np.abs(tiles[:, 0]) * np.sign(tiles[:, 0, ::-1])
    with pytest.raises(AssertionError):
        accept_pairs(tiles.ravel())


def test_streams_of_two_purposes_or_steps_are_uncorrelated() -> None:
    samples = [
        KEY.normals(purpose, step, 50_000)[:]
        for purpose in ("noise", "coins")
        for step in (0, 1, 2)
    ]
    scores = torch.stack(samples) @ torch.stack(samples).T / 50_000**0.5
    off_diagonal = scores[~torch.eye(len(samples), dtype=torch.bool)]
    assert off_diagonal.abs().max() < stats.norm.isf(FALSE_ALARM / 30)
