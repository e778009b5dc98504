from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.datasets.glove import WordVectors
from dpis.errors import InputError
from dpis.features import bags
from dpis.features.bags import bag_features
from dpis.features.cache import FeatureCache
from dpis.features.texts import embedding_table, tokenise, word_sequences

WORDS = ("the", ",", ".", "a", "n't", "do", "good", "bad", "film", "great", "awful", "well")


def vectors(words: tuple[str, ...] = WORDS, dimensions: int = 4) -> WordVectors:
    generator = torch.Generator().manual_seed(0)
    return WordVectors(
        words, torch.randn(len(words), dimensions, generator=generator), torch.arange(len(words))
    )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" \n", []),
        ("Don't", ["do", "n't"]),
        ("It’s CAN'T", ["it", "'s", "ca", "n't"]),
        ("cannot", ["can", "not"]),
        ("they've we'll I'd", ["they", "'ve", "we", "'ll", "i", "'d"]),
        ("good.<br /><br />Bad", ["good", ".", "bad"]),
        ("i <3 it, 3 < 4 > 2", ["i", "<", "3", "it", ",", "3", "<", "4", ">", "2"]),
        ("wait......what", ["wait", "...", "what"]),
        ("hm… yes -- no", ["hm", "...", "yes", "--", "no"]),
        ("the U.S. army", ["the", "u.s.", "army"]),
        ("Mr. Smith vs. Dr. No.", ["mr.", "smith", "vs.", "dr.", "no", "."]),
        ("1,000 in the 1990s, 2nd", ["1,000", "in", "the", "1990s", ",", "2nd"]),
        ("a well-made (naïve) film!", ["a", "well-made", "(", "naïve", ")", "film", "!"]),
        ("10/10 snake_case", ["10", "/", "10", "snake", "_", "case"]),
        ('"quoted"', ['"', "quoted", '"']),
    ],
)
def test_texts_are_split_as_gloves_were(text, tokens):
    assert tokenise(text) == tokens


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_tokens_are_never_empty_and_hold_no_space(text):
    for token in tokenise(text):
        assert token
        assert token.split() == [token]


def test_the_last_words_stay_and_padding_is_in_front():
    sequences = word_sequences(
        ["Good, film", "", "the good bad awful zebra"], WORDS, 4, cache=False
    )
    assert sequences.dtype == torch.int64
    code = {word: 2 + i for i, word in enumerate(WORDS)}
    assert sequences.tolist() == [
        [0, code["good"], code[","], code["film"]],
        [0, 0, 0, 0],
        [code["good"], code["bad"], code["awful"], 1],
    ]


def test_an_unknown_compound_is_taken_apart():
    assert word_sequences(["well-done"], WORDS, 2, cache=False).tolist() == [[13, 1]]
    assert word_sequences(["well-done"], (*WORDS, "well-done"), 2, cache=False).tolist() == [
        [0, 14]
    ]
    assert word_sequences(["--", "-"], WORDS, 1, cache=False).tolist() == [[1], [1]]


def test_codes_find_their_vectors():
    known = vectors()
    table = embedding_table(known)
    assert table.shape == (2 + len(WORDS), 4)
    assert table.dtype == torch.float32
    assert not table[:2].any()
    (sequence,) = word_sequences(["film"], known.words, 3, cache=False)
    assert torch.equal(table[sequence][-1], known.vectors[WORDS.index("film")])
    assert not table[sequence][:2].any()


@pytest.mark.parametrize("describe", ["sequences", "bag"])
def test_a_row_depends_on_its_text_alone(describe):
    """Neighbours, order and number of texts change nothing, to the last bit: that is why it is free."""
    texts = ["good film", "the awful film, a bad bad film", "", "zebra", "do n't", "great " * 300]
    known = vectors()

    def rows(part: list[str]) -> torch.Tensor:
        if describe == "sequences":
            return word_sequences(part, known.words, 5, cache=False)
        return bag_features(part, known, 3, cache=False)

    together = rows(texts)
    assert torch.equal(rows(texts[::-1]), together.flip(0))
    for i, text in enumerate(texts):
        assert torch.equal(rows([text])[0], together[i])


def test_bags_have_length_one_or_say_nothing():
    rows = bag_features(["good film", "zebra", "", "the"], vectors(), 3, cache=False)
    assert rows.shape == (4, 3 + 4)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=1), torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_bags_count_presence_not_number_or_order():
    a, b = bag_features(["good bad film", "film good good bad bad bad"], vectors(), cache=False)
    assert torch.equal(a, b)


def test_words_near_the_seeds_have_the_columns():
    words = (*(f"w{i}" for i in range(500)), "good", "bad", "fine")
    table = torch.randn(len(words), 20, generator=torch.Generator().manual_seed(0))
    table[-1] = table[-3] + 0.1 * table[0]  # fine is nearly good
    bag = bags.Bag.of(WordVectors(words, table, 9_000 + torch.arange(len(words))), columns=3)
    chosen = {word for word, column in zip(words, bag.column, strict=True) if column >= 0}
    assert chosen == {"good", "bad", "fine"}


def test_without_seeds_words_still_have_vectors():
    known = vectors(("x", "y", "z"))
    rows = bag_features(["x y", "z"], known, 2, cache=False)
    assert not rows[:, :2].any()
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))


def test_vectors_that_lie_in_a_plane_are_no_trouble():
    flat = WordVectors(("good", "bad", "x"), torch.ones(3, 4), torch.arange(3))
    assert torch.isfinite(bag_features(["good bad x"], flat, cache=False)).all()


def test_what_is_kept_is_what_would_be_computed(tmp_path, monkeypatch):
    texts, known = ["good film", "bad, awful"], vectors()
    fresh = (
        word_sequences(texts, known.words, 5, cache_dir=tmp_path),
        bag_features(texts, known, 3, cache_dir=tmp_path),
    )
    assert len(list(tmp_path.glob("*.npy"))) == 2
    monkeypatch.setattr("dpis.features.texts.word_places", None)
    monkeypatch.setattr("dpis.features.bags.word_places", None)
    kept = (
        word_sequences(texts, known.words, 5, cache_dir=tmp_path),
        bag_features(texts, known, 3, cache_dir=tmp_path),
    )
    for before, after in zip(fresh, kept, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_other_texts_or_words_have_another_key(tmp_path):
    cache = FeatureCache(tmp_path)
    keys = {
        cache.text_key(recipe, texts, words)
        for recipe in ("a", "b")
        for texts in (["x y"], ["x", "y"], ["y", "x"], ["x\0y"], [])
        for words in (["u"], ["u", "v"], ["u v"])
    }
    assert len(keys) == 30


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="length must be at least 1"):
        word_sequences(["a"], WORDS, 0)
    with pytest.raises(InputError, match="columns must not be negative"):
        bag_features(["a"], vectors(), -1)
