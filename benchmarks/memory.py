"""Peak memory of private steps: plain SGD, ours through both doors, Opacus.

    python benchmarks/memory.py                                  # all of it, ten minutes
    python benchmarks/memory.py --models gpt2 --engines sgd loop # some of it

Every cell is a process of its own, with one thread. It builds model and data, notes how much memory it has, and takes
steps: forward, backward, clipping, noise, SGD's update. What is shown is the most memory that it had above that, as
the operating system counts it, in MB: over the first five steps, in which we check gradients against autograd, and over
two later ones, in which we do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

LATER = 9
"""The first of the later steps: the 9th and the 10th are not among 1, 2, 4, 8, 16."""


# ── models ───────────────────────────────────────────────────────────────────────────────────────────


class NextWords(nn.Module):
    """A causal language model of the transformers library, from token ids to logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """The logits of every next word."""
        logits: Tensor = self.model(input_ids=words, use_cache=False).logits
        return logits


def gpt2(lora: bool = False) -> nn.Module:
    """GPT-2 small, from its configuration: 124 million parameters, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model: Any = GPT2LMHeadModel(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    return NextWords(model)


class Transformer(nn.Module):
    """Six layers of width 384 over word embeddings, averaged, classified: 11 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 384)
        layers = (
            nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
            for _ in range(6)
        )
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(384, 10)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of ten classes."""
        logits: Tensor = self.classify(self.layers(self.embedding(words)).mean(dim=1))
        return logits


class Residual(nn.Module):
    """A basic block of ResNet, with group normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs),
        )  # fmt: skip
        self.past = nn.Identity()
        if stride != 1:
            self.past = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """As many images, smaller by the stride."""
        return torch.relu(self.body(images) + self.past(images))


def resnet() -> nn.Module:
    """ResNet-18 for small images: 11 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
    ]
    width = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(width, outputs, stride), Residual(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def words(records: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (records, length))


@dataclass(frozen=True)
class Model:
    """What is trained, and on which batch; a batch is all of the data."""

    description: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    next_words: bool = False

    def dataset(self) -> TensorDataset:
        """One batch of random data."""
        inputs = self.inputs()
        targets = inputs.roll(-1, 1) if self.next_words else torch.randint(10, (len(inputs),))
        return TensorDataset(inputs, targets)


MODELS = {
    "gpt2": Model("GPT-2 small, 4 x 128", gpt2, lambda: words(4, 128, 50257), next_words=True),
    "gpt2-lora": Model("the same, LoRA", lambda: gpt2(lora=True), lambda: words(4, 128, 50257), next_words=True),
    "transformer": Model("transformer 6 x 384, 16 x 128", Transformer, lambda: words(16, 128, 1000)),
    "resnet": Model("ResNet-18, GroupNorm, 16 x 32 x 32", resnet, lambda: torch.randn(16, 3, 32, 32)),
}  # fmt: skip


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over records, and over words where a record has several."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────

StepDone = Callable[[], None]


def sgd_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def loop_over(
    loader: Any, model: Any, optimizer: Any, criterion: Any, steps: int, done: StepDone
) -> None:
    for _ in range(steps):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
        done()


def sgd(model: nn.Module, data: TensorDataset, steps: int, done: StepDone) -> None:
    loader = DataLoader(data, batch_size=len(data))
    loop_over(loader, model, sgd_of(model), loss_of, steps, done)


def loop(model: nn.Module, data: TensorDataset, steps: int, done: StepDone) -> None:
    """Ours, as a drop-in: every record is drawn in every step."""
    from dpis import PrivacyEngine

    made = PrivacyEngine().make_private(
        module=model.train(), optimizer=sgd_of(model), data_loader=DataLoader(data, batch_size=len(data)),
        noise_multiplier=1.0, max_grad_norm=1.0, n_public=len(data), method="dp-sgd",
    )  # fmt: skip
    loop_over(made[2], made[0], made[1], loss_of, steps, done)


def train(model: nn.Module, data: TensorDataset, steps: int, done: StepDone) -> None:
    """Ours, by `dpis.train`: every record is drawn in every step."""
    import dpis
    from dpis.training.progress import Silent

    class Told(Silent):
        def step_done(self, _: Any) -> None:
            done()

    with tempfile.TemporaryDirectory() as folder:
        dpis.train(
            model, data, loss_of, epsilon=8.0, delta=1e-3, n_public=len(data), batch_size=len(data),
            epochs=steps, out=Path(folder) / "run", privacy=dpis.Privacy(method="dp-sgd"),
            training=dpis.Training(optimizer=sgd_of(model), progress=Told(), physical_batch=len(data)),
        )  # fmt: skip


def opacus(mode: str) -> Callable[..., None]:
    def run(model: nn.Module, data: TensorDataset, steps: int, done: StepDone) -> None:
        from opacus import PrivacyEngine

        made = PrivacyEngine().make_private(
            module=model.train(), optimizer=sgd_of(model), data_loader=DataLoader(data, batch_size=len(data)),
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
            criterion=Criterion(),
        )  # fmt: skip
        model_, optimizer, *criterion, loader = made
        loop_over(loader, model_, optimizer, criterion[0] if criterion else loss_of, steps, done)

    return run


class Criterion(nn.CrossEntropyLoss):
    """With the attribute that ghost clipping asks for."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of every record, or their mean."""
        each = cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        each = each.view(len(targets), -1).mean(1)
        return each if self.reduction == "none" else each.mean()


ENGINES: dict[str, Callable[..., None]] = {
    "sgd": sgd,
    "train": train,
    "loop": loop,
    "opacus-hooks": opacus("hooks"),
    "opacus-ghost": opacus("ghost"),
}


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────


def kilobytes(field: str) -> int:
    """Of this process, by Linux: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: str, engine: str) -> dict[str, float]:
    """In this process: the peaks of first and later steps above what model and data take, in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    built, data = MODELS[model].build(), MODELS[model].dataset()
    sgd(nn.Linear(2, 2), TensorDataset(torch.zeros(2, 2), torch.zeros(2).long()), 1, lambda: None)
    forget_peak()
    start, peaks = kilobytes("VmRSS"), list[int]()

    def done() -> None:
        peaks.append(kilobytes("VmHWM"))
        forget_peak()

    ENGINES[engine](built, data, LATER + 1, done)
    weights = sum(p.numel() * p.element_size() for p in built.parameters())
    trained = sum(p.numel() * p.element_size() for p in built.parameters() if p.requires_grad)
    return {
        "first": (max(peaks[:5]) - start) / 1024,
        "later": (max(peaks[LATER - 1 :]) - start) / 1024,
        "weights": weights / 2**20,
        "gradients": trained / 2**20,
    }


def in_a_process(model: str, engine: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--cell", model, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [
            line
            for line in done.stderr.splitlines()
            if "Error" in line and not line.startswith(" ")
        ]
        return {"error": (lines or ["failed"])[-1][:90]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Every cell in a process of its own, as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "ENGINE"), help="one, in this process")
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(*options.cell)))
        return
    print(
        "| model (weights, gradients) | engine | first steps | later steps | whole, over SGD + a gradient |"
    )
    print("|---|---|---|---|---|")
    for model in options.models:
        plain = in_a_process(model, "sgd")
        for engine in options.engines:
            found = plain if engine == "sgd" else in_a_process(model, engine)
            if "error" in found:
                print(
                    f"| {MODELS[model].description} | {engine} | {found['error']} | | |", flush=True
                )
                continue
            sizes = f"{found['weights']:.0f}, {found['gradients']:.0f}"
            limit = plain["weights"] + plain["later"] + plain["gradients"]
            share = (found["weights"] + max(found["first"], found["later"])) / limit
            print(
                f"| {MODELS[model].description} ({sizes}) | {engine} | {found['first']:.0f} | "
                f"{found['later']:.0f} | {share:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
