import pytest
import torch

from dpis.errors import InputError
from dpis.features.augment import FARTHEST, Augmentation, flip, shift


def images(count=40):
    return torch.rand(count, 2, 9, 7, generator=torch.Generator().manual_seed(1))


def seeded():
    return torch.Generator().manual_seed(5)


def test_a_shifted_image_is_the_image_moved_with_black_coming_in():
    pictures = images()
    moved = shift(pictures, seeded())
    padded = torch.nn.functional.pad(pictures, [FARTHEST] * 4)
    for before, after in zip(padded, moved, strict=True):
        windows = [
            before[:, row : row + 9, column : column + 7]
            for row in range(2 * FARTHEST + 1)
            for column in range(2 * FARTHEST + 1)
        ]
        assert any(torch.equal(after, window) for window in windows)
    assert not torch.equal(moved, pictures)


def test_about_half_of_the_images_are_mirrored():
    pictures = images(400)
    mirrored = [
        torch.equal(a, b.flip(-1)) for a, b in zip(flip(pictures, seeded()), pictures, strict=True)
    ]
    assert 150 < sum(mirrored) < 250


@pytest.mark.parametrize("names", ["shift", "flip", "shift,flip"])
def test_every_row_is_changed_by_itself(names):
    pictures, labels = images(), torch.arange(40)
    changed, kept = Augmentation(names)((pictures, labels), seeded())
    other = torch.cat([torch.zeros(1, 2, 9, 7), pictures[1:]])
    again, _ = Augmentation(names)((other, labels), seeded())
    assert torch.equal(changed[1:], again[1:])
    assert torch.equal(kept, labels)


@pytest.mark.parametrize("names", ["", "shift,", "mixup"])
def test_unknown_changes_are_refused(names):
    with pytest.raises(InputError, match="--augment must name some of shift, flip"):
        Augmentation(names)
