"""Opponent colours: nothing is lost, and every image is changed by itself."""

import torch

from dpis.features.colours import opponent


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def test_nothing_is_lost():
    """Red, green and blue can be had back from brightness and the two differences."""
    before = images(7)
    brightness, red_blue, green_both = opponent(before).unbind(1)
    green = brightness - green_both / 3
    red_and_blue = 3 * brightness - green
    after = torch.stack([(red_and_blue + red_blue) / 2, green, (red_and_blue - red_blue) / 2], 1)
    torch.testing.assert_close(after, before)


def test_grey_has_no_differences():
    grey = images(3)[:, :1].expand(-1, 3, -1, -1)
    assert float(opponent(grey)[:, 1:].abs().max()) == 0.0


def test_an_image_is_changed_by_itself_bit_for_bit():
    """Rule 19: who else is there, and where, does not show."""
    several = images(300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(opponent(several[order]), opponent(several)[order])
    assert torch.equal(opponent(several[:1]), opponent(several)[:1])
