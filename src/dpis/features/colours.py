"""Colours as brightness and two differences: what a description of shapes sees three times in red, green and blue.

The three planes of a photograph show nearly the same picture. Scattered one by one they bring its shapes three times
and its colours as a small difference; scattered as opponents, colours have planes of their own. The rule is public and
looks at one pixel at a time, so it costs no privacy.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Colours(StrEnum):
    """Which planes of a colour image are described."""

    RGB = "rgb"
    """Red, green and blue, as they come."""
    OPPONENT = "opponent"
    """Brightness, red against blue, green against both."""


def opponent(images: Tensor) -> Tensor:
    """Float images ``[records, 3, height, width]`` of red, green, blue as brightness and two differences.

    >>> opponent(torch.tensor([1.0, 0.5, 0.0]).reshape(1, 3, 1, 1)).flatten().tolist()
    [0.5, 1.0, 0.0]
    """
    red, green, blue = images.unbind(1)
    return torch.stack([(red + green + blue) / 3, red - blue, red - 2 * green + blue], dim=1)
