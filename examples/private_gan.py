"""A GAN whose discriminator is trained on private records: the generator never sees more than it lets through.

    python examples/private_gan.py

Real records go through the private discriminator. Generated ones hold nobody: they go through the discriminator
itself, and their gradient joins the noisy one between noise and update. Their number is public, not that of the
batch that was drawn. The generator is trained on what the discriminator has released.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpis import PrivacyEngine

BATCH, DELTA = 256, 1e-5


def judged(discriminator: nn.Module, records: Tensor, real: float) -> Tensor:
    """The loss of a discriminator that should say how real these records are."""
    verdicts = discriminator(records)
    return functional.binary_cross_entropy_with_logits(verdicts, torch.full_like(verdicts, real))


def main(epochs: int = 40, records: int = 4096) -> tuple[float, Tensor]:
    """Returns epsilon and the mean of what is generated; of real records it is (2, -1)."""
    torch.manual_seed(0)
    real = torch.randn(records, 2) * 0.5 + torch.tensor([2.0, -1.0])
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=discriminator,
        optimizer=torch.optim.Adam(discriminator.parameters(), lr=0.005, betas=(0.5, 0.9)),
        data_loader=DataLoader(TensorDataset(real), batch_size=BATCH),
        noise_multiplier=1.0, max_grad_norm=1.0, n_public=records,
    )  # fmt: skip
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.005, betas=(0.5, 0.9))
    fake = torch.zeros(0)

    def add_generated(optimizer: torch.optim.Optimizer) -> None:
        loss = judged(discriminator, fake.detach(), real=0.0)
        gradients = torch.autograd.grad(loss, optimizer.params)
        for parameter, gradient in zip(optimizer.params, gradients, strict=True):
            parameter.grad += gradient

    optimizer.attach_step_hook(add_generated)
    for _ in range(epochs):
        for (drawn,) in loader:
            fake = generator(torch.randn(BATCH, 4))
            optimizer.zero_grad()
            judged(private, drawn, real=1.0).backward()
            optimizer.step()  # noise, then `add_generated`, then the update
            generator_optimizer.zero_grad()
            loss = judged(discriminator, fake, real=1.0)
            loss.backward(inputs=list(generator.parameters()))  # not those of the discriminator
            generator_optimizer.step()
    with torch.no_grad():
        mean = generator(torch.randn(2000, 4)).mean(0)
    epsilon = engine.get_epsilon(DELTA)
    print(f"epsilon {epsilon:.2f}, generated mean {mean.tolist()}, real (2, -1)")
    return epsilon, mean


if __name__ == "__main__":
    main()
