"""Train a private classifier from Python: your module, your data set, one call.

    python examples/train_mnist_like.py

Takes the sample of Fashion-MNIST that comes with the package; any map-style data set of (input, target) will do.
"""

from torch import nn
from torch.utils.data import TensorDataset

import dpis
from dpis.datasets.sample import load_sample


def main() -> None:
    """A small convolutional network at epsilon = 3."""
    images = load_sample()
    train = TensorDataset(images.train_images[:, None] / 255, images.train_labels)
    test = TensorDataset(images.test_images[:, None] / 255, images.test_labels)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip
    result = dpis.train(
        model, train, nn.CrossEntropyLoss(),
        epsilon=3.0, delta=1e-5, n_public=10_000,   # a public number of records
        batch_size=500, epochs=10, lr=2.0, held_out=test,
        # the noise of DP-SGD at a batch of 1,000 for fewer gradients
        privacy=dpis.Privacy(equivalent_batch=1000, clip_norm=0.1),
        training=dpis.Training(ema=0.95, progress=True),
    )  # fmt: skip
    print(
        f"accuracy {100 * result.metrics['accuracy']:.1f} % with {result.claim}, in {result.folder}"
    )


if __name__ == "__main__":
    main()
