"""Models as people have them: each trains as it is, or is refused with the harm and the edit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpis import ModuleValidator
from dpis.coupling import forbidden_layers
from dpis.coupling.forbidden_layers import FrozenNormWarning
from dpis.errors import CouplingError, InputError, MisuseError

from . import Loop, data, first_batch, mlp, private
from .one_more import MOST, assert_adds_its_own

# ── batch normalisation ──────────────────────────────────────────────────────────────────────────────


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(MOST, 1, 5, 5, generator=generator),
        torch.randint(3, (MOST,), generator=generator),
    )


def resnet() -> nn.Sequential:
    """A backbone with batch normalisation that has seen something, and a head."""
    torch.manual_seed(4)
    norm = nn.BatchNorm2d(4)
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten())
    backbone(torch.randn(20, 1, 5, 5))
    return nn.Sequential(backbone, nn.Linear(36, 3))


def frozen() -> nn.Sequential:
    model = resnet()
    model[0].requires_grad_(False)
    return model


def a_step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.model.train()  # as every loop says
    loop.step(inputs, targets)


def test_resnet18_frozen_bn_backbone_head_trained() -> None:
    model = frozen()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.warns(FrozenNormWarning, match=r"'0.1' is the first.*without noise"):
        loop = private(model, images(), n_public=MOST)
    for batch in loop.loader:  # said once: a second time would be an error here
        a_step(loop, *batch)
    with torch.no_grad():
        loop.model.train()(torch.randn(3, 1, 5, 5))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_frozen_batch_normalisation_couples_nobody() -> None:
    with pytest.warns(FrozenNormWarning):
        assert_adds_its_own(a_step, frozen, images())


def test_in_training_mode_frozen_batch_normalisation_would_couple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is refused at once: nothing but the evaluation mode lets it pass."""
    monkeypatch.setattr(forbidden_layers, "_fix_frozen", lambda module, layers: None)
    with pytest.raises(CouplingError, match="normalises by statistics of the whole batch"):
        private(frozen(), images(), n_public=MOST)


def test_resnet18_frozen_bn_eval_backbone() -> None:
    def model() -> nn.Module:
        made = frozen()
        made[0].eval()
        return made

    assert_adds_its_own(lambda loop, *batch: loop.step(*batch), model, images())


@pytest.mark.parametrize("affine", [True, False])
def test_resnet18_bn_unfixed(affine: bool) -> None:
    model = resnet()
    model[0][1] = nn.BatchNorm2d(4, affine=affine)
    with pytest.raises(CouplingError, match=r"statistics of the whole batch.*dpis\.fix"):
        private(model, images())


def test_resnet18_bn_fix() -> None:
    assert_adds_its_own(a_step, lambda: ModuleValidator.fix(resnet()), images())


def test_frozen_backbone_two_modules_head_private() -> None:
    backbone = resnet()[0].eval().requires_grad_(False)

    def step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            features = backbone(inputs)
        loop.step(features, targets)

    def head() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(36, 3)

    assert_adds_its_own(step, head, images())


# ── what is trained changes ──────────────────────────────────────────────────────────────────────────


def test_gradual_unfreezing() -> None:
    """From the second epoch on all layers are trained, clipped together and noised; before, the head alone."""
    model = mlp()
    model[0].requires_grad_(False)
    loop = private(model, max_grad_norm=1e-3, method="dp-sgd")
    first = model.get_parameter("0.weight").detach().clone()
    loop.train()
    assert torch.equal(model.get_parameter("0.weight"), first)
    model[0].requires_grad_(True)
    loop.train()
    moved = model.get_parameter("0.weight") != first
    assert moved.all()  # by noise, everywhere
    assert len(loop.engine.accountant) == 2 * len(loop.loader)
    model[2].requires_grad_(False)
    last = model.get_parameter("2.weight").clone()
    loop.train()
    assert torch.equal(model.get_parameter("2.weight"), last)


def test_a_bare_gradient_of_a_thawed_layer_is_not_stepped_with() -> None:
    """It arrived while nobody guarded the layer, and the loop skips the model where nobody was drawn."""
    model = mlp()
    model[0].requires_grad_(False)
    loop = private(model, dataset=data(1), n_public=4000, loader={"batch_size": 1})
    inputs, _ = next(iter(loop.loader))
    assert not len(inputs)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    model(torch.ones(1, before.shape[1], dtype=before.dtype)).sum().backward()
    bare = weight.grad.clone()
    loop.optimizer.step()
    moved = before - weight.detach()
    assert moved.all()  # by noise
    assert not torch.allclose(moved / moved.norm(), bare / bare.norm(), atol=1e-3)
    assert not torch.equal(weight.grad, bare)


def test_thawed_layers_are_clipped_with_the_others() -> None:
    def step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
        loop.plain_model[0].requires_grad_(True)  # after make_private and the draw
        loop.step(inputs, targets)

    def model() -> nn.Module:
        made = mlp()
        made[0].requires_grad_(False)
        return made

    assert_adds_its_own(step, model, data(MOST), max_grad_norm=1e-3)


def test_gradients_past_the_model_are_refused_for_thawed_layers_too() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    loop = private(model).train(steps=1)
    model[0].requires_grad_(True)
    loop.train(steps=1)
    with pytest.raises(MisuseError, match="neither clipped nor noised"):
        model[0](torch.ones(1, 4).double()).sum().backward()


def test_grad_accumulation_skip_step() -> None:
    loop = private()
    batches, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(MisuseError, match=r"would tell about the records.*BatchMemoryManager"):
        next(batches)


def test_submodule_call_model_encode() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def encode(self, x: Tensor) -> Tensor:
            return self.body(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    loop = private(Encoder())
    _, inputs, targets = first_batch(loop)
    with pytest.raises(MisuseError, match=r"not a layer or a method of it"):
        functional.cross_entropy(loop.model.encode(inputs), targets).backward()


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "changed",
    [lambda x: x + 0.1 * torch.randn_like(x), lambda x: 0.7 * x + 0.3 * x.flip(0)],
    ids=["input_noise_augment_in_loop", "mixup_in_loop"],
)
def test_inputs_changed_in_the_loop(changed: Callable[[Tensor], Tensor]) -> None:
    """Whether rows were mixed cannot be told there; in the dataset each is changed by itself, with its own chance."""
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(
        MisuseError,
        match=r"mixture of records is not bounded.*collate function.*inputs_as_delivered",
    ):
        loop.model(changed(inputs))


def test_uint8_to_float_in_loop() -> None:
    inputs = torch.randint(256, (MOST, 4), generator=torch.Generator().manual_seed(1)).to(
        torch.uint8
    )
    dataset = TensorDataset(inputs, data(MOST)[:][1])
    assert_adds_its_own(lambda loop, x, y: loop.step(x.double() / 255, y), mlp, dataset)


# ── precision, checkpointing, compilation ────────────────────────────────────────────────────────────


def in_half(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(loop.model(inputs), targets)
    loss.backward()
    loop.optimizer.step()


@pytest.mark.parametrize("records", [MOST, 11])
def test_bf16_autocast(records: int) -> None:
    dataset = data(records, torch.float32)
    assert_adds_its_own(in_half, lambda: mlp(torch.float32), dataset, max_grad_norm=1e-2)


@pytest.mark.parametrize("records", [MOST, 11])
def test_bf16_model_weights(records: int) -> None:
    dataset = data(records, torch.bfloat16)
    assert_adds_its_own(
        lambda loop, *batch: loop.step(*batch),
        lambda: mlp(torch.bfloat16),
        dataset,
        max_grad_norm=1e-2,
    )


class Encoder(nn.Module):
    """A transformer that drops out and is run again on the way back."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.layer, x[:, None].expand(-1, 3, -1), use_reentrant=False)
        return self.head(hidden.mean(1))


def test_dropout_and_checkpointing_encoder() -> None:
    """Masks go by place and layer, so the law is of a model without; with them it trains."""
    assert_adds_its_own(lambda loop, *batch: loop.step(*batch), Encoder, data(MOST))
    loop = private(Encoder(dropout=0.1)).train()
    assert loop.weights.isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making
@pytest.mark.parametrize(
    "before", [True, False], ids=["compile_before_make_private", "compile_after_make_private"]
)
def test_compiled_models(before: bool) -> None:
    model = mlp()
    loop = private(torch.compile(model) if before else model)  # type: ignore[arg-type]
    if not before:
        loop.model = torch.compile(loop.model)  # type: ignore[assignment]
    loop.train()
    assert len(loop.engine.accountant) == len(loop.loader)


def test_microbatches_split_in_loop() -> None:
    """Each part goes through model and backward by itself: its mean counts as it is."""

    def step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
        loop.optimizer.zero_grad()
        for rows, wanted in zip(inputs.split(4), targets.split(4), strict=True):
            functional.cross_entropy(loop.model(rows), wanted).backward()
        loop.optimizer.step()

    assert_adds_its_own(step, mlp, data(MOST))


def test_lstm_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.lstm = nn.LSTM(2, 4, batch_first=True).double()
            self.head = nn.Linear(4, 3).double()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            return self.head(self.lstm(packed)[1][0][-1])

    def step(loop: Loop, inputs: Tensor, lengths: Tensor, targets: Tensor) -> None:
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(inputs, lengths), targets).backward()
        loop.optimizer.step()

    generator = torch.Generator().manual_seed(4)
    texts = torch.randn(MOST, 5, 2, generator=generator).double()
    lengths = torch.randint(1, 6, (MOST,), generator=generator)
    assert_adds_its_own(step, Packed, TensorDataset(texts, lengths, data(MOST)[:][1]))


# ── models that compute a loss ───────────────────────────────────────────────────────────────────────


class WithLoss(nn.Module):
    """Given labels it returns a loss for the batch, of one kind or another."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], optional: bool = True) -> None:
        super().__init__()
        self.body, self.loss, self.optional = mlp(), loss, optional

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            assert self.optional
            return {"logits": logits}
        return {"loss": self.loss(logits, labels), "logits": logits}


def with_labels(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.optimizer.zero_grad()
    loop.model(inputs, labels=targets)["loss"].backward()
    loop.optimizer.step()


def test_a_model_of_ones_own_that_computes_its_loss() -> None:
    assert_adds_its_own(with_labels, lambda: WithLoss(functional.cross_entropy), data(MOST))


@pytest.mark.parametrize("optional", [True, False])
def test_a_loss_that_is_not_known_is_refused(optional: bool) -> None:
    model = WithLoss(lambda out, y: functional.cross_entropy(out, y) ** 2, optional)
    loop = private(model)
    _, inputs, targets = first_batch(loop)
    with pytest.raises(InputError, match=r"without (labels|them)"):
        with_labels(loop, inputs, targets)


def test_labels_that_are_an_input_as_any_other() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.table = mlp(), nn.Embedding(3, 4).double()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.body(x + self.table(labels))

    def step(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
        loop.optimizer.zero_grad()
        functional.cross_entropy(loop.model(inputs, labels=targets), targets).backward()
        loop.optimizer.step()

    assert_adds_its_own(step, Conditional, data(MOST))


def test_labels_of_an_empty_batch() -> None:
    loop = private(
        WithLoss(functional.cross_entropy), data(6), loader={"batch_size": 1}, n_public=6
    )
    for _ in range(3):
        for inputs, targets in loop.loader:
            with_labels(loop, inputs, targets)
    assert loop.weights.isfinite().all()
