import pytest
import torch

from dpis.errors import InputError
from dpis.features.augment import MOVES, Augmentation, View, other_views

IMAGES = torch.rand(5, 2, 9, 7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("down", "right"), MOVES)
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_view_is_the_image_moved_with_black_coming_in(down, right, mirrored):
    found = View(down, right, mirrored)(IMAGES)
    expected = torch.zeros_like(IMAGES)
    for row in range(9):
        for column in range(7):
            if 0 <= row + down < 9 and 0 <= column + right < 7:
                place = 6 - (column + right) if mirrored else column + right
                expected[:, :, row + down, place] = IMAGES[:, :, row, column]
    assert torch.equal(found, expected)
    assert torch.equal(View(down, right, mirrored)(IMAGES[:, 0]), expected[:, 0])  # grey images too


@pytest.mark.parametrize(("names", "most"), [("shift", 9), ("flip", 2), ("shift,flip", 18)])
def test_views_differ_from_the_image_and_from_each_other(names, most):
    views = other_views(Augmentation(names), most)
    assert len({View(), *views}) == most
    assert other_views(Augmentation(names), 2) == views[:1]
    for count in (0, 1, most + 1):
        with pytest.raises(InputError, match=f"needs --augmentations, from 2 to {most}"):
            other_views(Augmentation(names), count)
