"""Texts as GloVe's own were split, and as places in a public vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_TAG = re.compile(r"<[a-z/][^<>]*>")
_DOTS = re.compile(r"\.{2,}|…")
_TOKEN = re.compile(
    r"""'(?:s|m|d|re|ve|ll)\b          # what stays of he's, I'm, they've
      | n't\b                           # and of don't
      | (?:[^\W\d_]\.){2,}              # u.s.
      | \b(?:mr|mrs|ms|dr|st|jr|vs)\.
      | \d+(?:[.,]\d+)+                 # 1,000
      | [^\W_]+(?:-[^\W_]+)*            # words with their hyphens, 10, 1990s, 2nd
      | \.\.\. | -{2,}
      | \S                              # any other sign by itself
    """,
    re.VERBOSE,
)


def tokenise(text: str) -> list[str]:
    """Split a text as GloVe's was: lower case, signs apart, ``don't`` as ``do`` and ``n't``; HTML tags go.

    Example:
        >>> tokenise("I don't like Mr. Bean's 2nd film....<br />It's so-so!")
        ['i', 'do', "n't", 'like', 'mr.', 'bean', "'s", '2nd', 'film', '...', 'it', "'s", 'so-so', '!']
    """
    text = _TAG.sub(" ", text.lower().replace("’", "'"))
    text = text.replace("n't", " n't").replace("cannot", "can not")
    return _TOKEN.findall(_DOTS.sub(" ... ", text))


def word_places(texts: Sequence[str], words: Sequence[str]) -> Iterator[list[int]]:
    """For every text the places of its words in ``words``, -1 for others.

    A compound that is not there is taken apart at its hyphens.

    Example:
        >>> list(word_places(["A well-made film.", ""], ["a", "well", "film"]))
        [[0, 1, -1, 2, -1], []]
    """
    place = {word: i for i, word in enumerate(words)}
    for text in texts:
        places = []
        for token in tokenise(text):
            if token in place or "-" not in token.strip("-"):
                places.append(place.get(token, -1))
            else:
                places.extend(place.get(part, -1) for part in token.split("-"))
        yield places
