"""Train a Lightning module privately: one callback more, the module as it was.

pip install 'dpis[lightning]'
python examples/lightning_loop.py
"""

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpis import Privacy
from dpis.datasets.sample import load_sample
from dpis.dropin.lightning import PrivacyCallback


class Classifier(lightning.LightningModule):
    """A small convolutional network; nothing in it knows of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
            nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of ten classes."""
        return self.net(images)

    def training_step(self, batch, batch_idx):
        """The loss of a batch, a mean over its rows."""
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        """Accuracy on held-out data: what schedulers and early stopping may read."""
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main(epochs: int = 3, records: int = 10_000) -> lightning.Trainer:
    """At epsilon = 3, on the sample that comes with the package."""
    images = load_sample()
    train = TensorDataset(images.train_images[:records, None] / 255, images.train_labels[:records])
    test = TensorDataset(images.test_images[:, None] / 255, images.test_labels)
    privacy = Privacy(epsilon=3.0, delta=1e-5, clip_norm=0.5, n_public=records)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[PrivacyCallback(privacy)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=256), DataLoader(test, batch_size=500))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
    return trainer


if __name__ == "__main__":
    main()
