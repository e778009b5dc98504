"""A training loop that existed already, made private: three lines more, the loop as it was.

    python examples/dropin_loop.py

With ``from opacus import PrivacyEngine`` and without ``n_public`` the same file is an Opacus script.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpis import PrivacyEngine
from dpis.datasets.sample import load_sample


def main(epochs: int = 5, records: int = 10_000) -> tuple[float, float]:
    """Returns epsilon and held-out accuracy."""
    images = load_sample()
    train = TensorDataset(images.train_images[:records, None] / 255, images.train_labels[:records])
    loader = DataLoader(train, batch_size=256)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader,
        target_epsilon=3.0, target_delta=1e-5, epochs=epochs, max_grad_norm=0.5,
        n_public=records,  # a public number of records
    )  # fmt: skip

    for epoch in range(1, epochs + 1):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            predicted = model(images.test_images[:, None] / 255).argmax(1)
        accuracy = (predicted == images.test_labels).float().mean().item()
        epsilon = engine.get_epsilon(delta=1e-5)
        print(f"epoch {epoch}: epsilon {epsilon:.2f}, accuracy {100 * accuracy:.1f} %")
    return epsilon, accuracy


if __name__ == "__main__":
    main()
