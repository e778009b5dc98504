"""What people do in their loops, and may go on doing."""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpis import BatchMemoryManager, PrivacyEngine
from dpis.dropin.workers import TensorBatches
from dpis.mechanism import noisy_update

from .loops import BATCH, RECORDS, Loop, data, mlp, private


@functools.cache
def usual() -> Loop:
    """One epoch of the usual loop."""
    return private().train()


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        noisy_update,
        "add_noise",
        lambda sums, std, stream: {name: value.double() for name, value in sums.items()},
    )


# ── zero_grad, backward, step ────────────────────────────────────────────────────────────────────────


def first(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.step(inputs, targets)


def between(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loss = functional.cross_entropy(loop.model(inputs), targets)
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()


def last(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    functional.cross_entropy(loop.model(inputs), targets).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def of_the_model(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loop.model.zero_grad()
    functional.cross_entropy(loop.model(inputs), targets).backward()
    loop.optimizer.step()


def never(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    functional.cross_entropy(loop.model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)  # of no effect
    loop.optimizer.step()


def in_a_closure(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = functional.cross_entropy(loop.model(inputs), targets)
        loss.backward()
        return loss

    assert isinstance(loop.optimizer.step(closure), Tensor)


def in_two_losses(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    loss = functional.cross_entropy(loop.model(inputs), targets) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    loop.optimizer.step()


def by_hand_in_parts(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    for part in torch.arange(len(inputs)).split(3):
        functional.cross_entropy(loop.model(inputs[part]), targets[part]).backward()
    loop.optimizer.step()


def changed_in_place(loop: Loop, inputs: Tensor, targets: Tensor) -> None:
    logits = loop.model(inputs)
    logits += 1.0
    functional.cross_entropy(logits, targets).backward()
    loop.optimizer.step()


ORDERS = [between, last, of_the_model, never, in_a_closure, in_two_losses, by_hand_in_parts]


@pytest.mark.parametrize("order", [*ORDERS, changed_in_place])
def test_any_legal_order_takes_the_same_step(order: Any):
    expected, loop = usual(), private()
    for inputs, targets in loop.loader:
        order(loop, inputs, targets)
    assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-12)
    assert len(loop.engine.accountant) == len(expected.engine.accountant) == RECORDS // BATCH


def test_a_loop_may_break_and_go_on():
    loop = private(epochs=3, method="dp-sgd")
    loop.train(steps=2)
    assert len(loop.engine.accountant) == 2
    loop.train(2)
    assert len(loop.engine.accountant) == 2 + 2 * len(loop.loader)
    assert loop.engine.get_epsilon(1e-3) < 2.0


@pytest.mark.parametrize("method", ["dpis", "dpis-adaptive"])
def test_a_look_at_a_batch_costs_no_epoch(method: str):
    few = {"n_public": 80, "dataset": data(80)}
    loop = private(epochs=2, method=method, **few)
    looks = [next(iter(loop.loader))[0] for _ in range(3)]
    assert all(torch.equal(looks[0], look) for look in looks[1:])  # nobody draws twice for one step
    loop.train(2)
    steps = [e for e, _ in loop.engine.accountant.journal._runs if hasattr(e, "sampling_rate")]
    events = loop.engine.accountant.journal.events
    assert sum(events[step] for step in set(steps)) == 2 * len(loop.loader)


def test_evaluation_between_steps_and_epochs():
    def evaluate(loop: Loop) -> None:
        records, labels = data()[:]
        loop.model.eval()
        assert functional.cross_entropy(loop.model(records), labels).isfinite()
        loop.model.train()
        with torch.no_grad():
            assert type(loop.model(records)) is Tensor
        with torch.inference_mode():
            loop.model(records)

    expected, loop = private().train(2), private()
    for _ in range(2):
        for inputs, targets in loop.loader:
            loop.step(inputs, targets)
            evaluate(loop)
        evaluate(loop)
    assert torch.equal(loop.weights, expected.weights)


# ── physical batches ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 3, 100])
def test_physical_batches_add_up_to_the_same_update(size: int):
    expected, loop = private(headroom=2.0).train(2), private(headroom=2.0)
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=loop.loader, max_physical_batch_size=size, optimizer=loop.optimizer
        ) as parts:
            assert len(parts) == math.ceil(len(loop.loader) * max(1, BATCH / size))
            for inputs, targets in parts:
                assert len(inputs) <= size
                loop.step(inputs, targets)
    assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-12)
    assert loop.engine.accountant.journal.events == expected.engine.accountant.journal.events


def test_physical_batches_may_be_left_in_the_middle():
    loop = private()
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=1, optimizer=loop.optimizer
    ) as parts:
        loop.step(*next(iter(parts)))
    taken = len(loop.engine.accountant)
    loop.train()
    assert len(loop.engine.accountant) == taken + len(loop.loader)


# ── learning rates, groups ───────────────────────────────────────────────────────────────────────────

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("of", ["optimizer", "plain_optimizer"])
def test_schedulers_change_the_rate_of_the_steps(name: str, of: str):
    loop = private(optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5))
    scheduler = SCHEDULERS[name](getattr(loop, of))
    rates = []
    for inputs, targets in loop.loader:
        rates.append(loop.optimizer.param_groups[0]["lr"])
        before = loop.weights
        loop.step(inputs, targets)
        assert not torch.equal(loop.weights, before)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 1
    assert loop.plain_optimizer.param_groups is loop.optimizer.param_groups


def test_groups_keep_their_own_settings():
    def in_groups(parameters: Any) -> torch.optim.Optimizer:
        weights = list(parameters)
        groups = [{"params": weights[:2], "lr": 0.0}, {"params": weights[2:]}]
        return torch.optim.Adam(groups, lr=0.1)

    loop = private(optimizer=in_groups)
    before = [p.detach().clone() for p in loop.plain_model.parameters()]
    loop.train()
    moved = [
        not torch.equal(p, b) for p, b in zip(loop.plain_model.parameters(), before, strict=True)
    ]
    assert moved == [False, False, True, True]
    assert loop.optimizer.state_dict().keys() == loop.plain_optimizer.state_dict().keys()


def test_the_names_that_people_read_off_the_optimizer():
    loop = private(noise_multiplier=1.5, max_grad_norm=0.7)
    assert (loop.optimizer.noise_multiplier, loop.optimizer.max_grad_norm) == (1.5, 0.7)
    assert loop.optimizer.expected_batch_size == BATCH
    assert loop.loader.sample_rate == BATCH / RECORDS
    assert private(epochs=2).optimizer.noise_multiplier > 0


class Items(TensorDataset):
    """Not plain, as far as the loader can tell: read item by item."""


@pytest.mark.parametrize("batch", [BATCH, 1])  # of 1, every third batch is empty
def test_plain_tensors_are_batched_at_once_and_come_out_as_items_do(batch: int):
    plain = private(loader={"batch_size": batch})
    items = private(dataset=Items(*data().tensors), loader={"batch_size": batch})
    assert type(plain.loader.dataset) is TensorBatches
    pairs = zip(_delivered(plain), _delivered(items), strict=True)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert torch.equal(plain.weights, items.weights)


def _delivered(loop: Loop) -> list[Tensor]:
    found: list[Tensor] = []
    for inputs, targets in loop.loader:
        found += [inputs, targets]
        loop.step(inputs, targets)
    return found


def test_the_data_set_of_a_private_loader_is_the_users_own_in_all_but_batches():
    records = data()
    loop = private(dataset=records)
    dataset = loop.loader.dataset
    assert isinstance(dataset, TensorDataset)
    assert torch.equal(dataset[[True] + 39 * [False]][0], records[:1][0])
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[-1][0], records[-1][0])
    dataset.tensors = tuple(t.flip(0) for t in records.tensors)  # whoever changes it, both see it
    assert dataset.tensors is records.tensors
    for inputs, targets in loop.loader:
        drawn = loop.session._current.draw.indices
        assert torch.equal(inputs, records.tensors[0][drawn])
        loop.step(inputs, targets)


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────

WORKERS = {
    "spare": {"num_workers": 4, "prefetch_factor": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("steps", [None, 2], ids=["whole epochs", "broken off"])
def test_prefetching_uniform_sampling_changes_no_bit(workers: str, steps: int | None):
    if steps is None:
        expected = private(method="dp-sgd").train(3)
        loop = private(method="dp-sgd", loader=WORKERS[workers]).train(3)
        assert torch.equal(loop.weights, expected.weights)
    else:  # more draws are given up where more were made ahead: only order and counts can be compared
        loop = private(method="dp-sgd", loader=WORKERS[workers]).train(3, steps)
        assert len(loop.engine.accountant) == 3 * steps
        assert loop.weights.isfinite().all()


@pytest.mark.slow
def test_prefetched_batches_are_weighed_by_what_they_were_drawn_with(without_noise: None):
    """At a clip norm that is larger than norms: else importance is always C, and nothing could be told."""
    C, outdated = 10.0, 0
    loop = private(
        headroom=1.0,
        loader={"num_workers": 2, "prefetch_factor": 2},
        noise_multiplier=0.5,
        max_grad_norm=C,
        kappa=0.25,
    )
    records, _ = data()[:]
    sampler = loop.session.mechanism.sampler
    for _ in range(3):
        for inputs, targets in loop.loader:
            draw = loop.session._current.draw
            known = sampler.last_norms[draw.indices].double().clamp(0.05 * C, C)
            outdated += int((~torch.isclose(known, draw.importance)).sum())
            assert torch.equal(inputs, records[draw.indices])
            gradients = by_record(loop.plain_model, inputs, targets)
            norms = gradients.norm(dim=1)
            weights = 1 / torch.maximum(norms, draw.importance)
            before = loop.weights
            loop.step(inputs, targets)
            scale = 0.1 * C * 0.25 / BATCH
            expected = before - scale * (weights[:, None] * gradients).sum(0)
            assert torch.allclose(loop.weights, expected, rtol=0, atol=1e-9)
    assert outdated > 0  # some were drawn before their last norm was known


def by_record(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    rows = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]),
                    list(model.parameters()),
                )
            ]
        )
        for i in range(len(inputs))
    ]
    size = sum(p.numel() for p in model.parameters())
    return torch.stack(rows) if rows else torch.zeros(0, size, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_change_of_rate_flushes_the_draws(workers: int):
    loop = private(epochs=3, kappa="1,0.4,1", loader={"num_workers": workers})
    rates = []
    for _ in range(3):
        loop.train()
        rates.append(loop.session.mechanism.terms.sampling_rate)
    assert rates == pytest.approx([0.2, 0.5, 0.2])
    counts = [(event.sampling_rate, n) for event, n in loop.engine.accountant.journal._runs]
    assert counts == [(rates[0], 5), (rates[1], 5), (rates[2], 5)]
    assert loop.engine.get_epsilon(1e-3) <= 2.0


def test_breaking_off_an_epoch_of_its_own_terms_spends_it():
    loop = private(epochs=2, kappa="1:0.5")
    loop.train(2, steps=1)
    assert len(loop.engine.accountant) == len(loop.loader) + 1


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_pinned_memory_does_no_harm():
    assert torch.equal(private(loader={"pin_memory": True}).train().weights, usual().weights)


# ── empty batches ────────────────────────────────────────────────────────────────────────────────────


class Flattening(nn.Module):
    """Cannot be run on no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(x.size(0), -1))


@pytest.mark.parametrize("make", [mlp, Flattening])
def test_empty_batches_are_steps_of_noise(make: Any):
    loop = private(make(), loader={"batch_size": 1})
    losses = []
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        loss = functional.cross_entropy(loop.model(inputs), targets)
        losses.append(loss.item())
        loss.backward()
        before = loop.weights
        loop.optimizer.step()
        assert loop.weights.isfinite().all()
        assert not torch.equal(loop.weights, before)
    assert any(math.isnan(loss) for loss in losses)
    assert not all(math.isnan(loss) for loss in losses)
    assert len(loop.engine.accountant) == RECORDS


def test_nobody_is_ever_drawn_from_a_tiny_data_set():
    few = TensorDataset(*data()[:2])
    loop = private(Flattening(), few, n_public=400, loader={"batch_size": 1})
    loop.train(steps=5)  # nothing was ever seen when the first empty batch comes
    assert loop.weights.isfinite().all()


class Texts(Dataset):
    """Items with names and sequences of their own lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"words": torch.arange(1 + index % 4), "name": str(index), "label": index % 3}


def padded(items: list[Any]) -> dict[str, Any]:
    """To four words, whatever the longest."""
    empty = torch.zeros(4, dtype=torch.long)
    words = nn.utils.rnn.pad_sequence([*(item["words"] for item in items), empty])[:, :-1]
    labels = torch.tensor([item["label"] for item in items])
    return {"words": words, "names": [item["name"] for item in items], "label": labels}


class Reader(nn.Module):
    """Rows in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 3, num_layers=2)
        self.head = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        output, (hidden, _) = self.lstm(self.table(words))
        return self.head(output), hidden


@pytest.mark.parametrize("parts", [None, 2])
def test_time_first_models_and_batches_of_any_kind(parts: int | None):
    torch.manual_seed(0)
    settings = {"batch_size": 2, "collate_fn": padded}
    loop = private(Reader(), Texts(), batch_first=False, n_public=12, loader=settings)
    sizes, loader = [], loop.loader if parts is None else loop.loader.in_parts(parts)
    for _ in range(3):
        for batch in loader:
            assert batch["words"].shape[1] == len(batch["names"]) == len(batch["label"])
            sizes.append(len(batch["names"]))
            output, hidden = loop.model(batch["words"])
            loss = functional.cross_entropy(output[-1] + hidden[-1], batch["label"])
            loss.backward()
            loop.optimizer.step()
    assert 0 in sizes
    assert max(sizes) > 1
    assert loop.weights.isfinite().all()


# ── models of many forms ─────────────────────────────────────────────────────────────────────────────


class Forked(nn.Module):
    """Two inputs, one by name; a dictionary and a tuple come out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor, *, extra: Tensor) -> dict[str, Any]:
        both = self.one(x) + self.two(extra)
        return {"logits": both, "parts": (self.one(x), both.detach())}


def test_several_inputs_and_outputs():
    records, labels = data()[:]
    loop = private(Forked(), TensorDataset(records, records[:, :2], labels))
    before = loop.weights
    for inputs, extra, targets in loop.loader:
        outputs = loop.model(inputs, extra=extra)
        loss = functional.cross_entropy(outputs["logits"] + outputs["parts"][0], targets)
        loss.backward()
        loop.optimizer.step()
    assert not torch.equal(loop.weights, before)


class Checkpointed(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.inner = again, mlp()

    def forward(self, x: Tensor) -> Tensor:
        first_part = self.inner[:2]
        hidden = checkpoint(first_part, x, use_reentrant=False) if self.again else first_part(x)
        return self.inner[2](hidden)


def test_gradient_checkpointing_takes_the_same_steps():
    expected, loop = private(Checkpointed(False)).train(2), private(Checkpointed(True)).train(2)
    assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-12)


def test_a_sum_of_losses_is_scaled_as_people_expect():
    mean = usual()
    loop = private(loss_reduction="sum", optimizer=lambda p: torch.optim.SGD(p, lr=0.1 / BATCH))
    for inputs, targets in loop.loader:
        functional.cross_entropy(loop.model(inputs), targets, reduction="sum").backward()
        loop.optimizer.step()
    assert torch.allclose(loop.weights, mean.weights, rtol=0, atol=1e-12)


def test_the_ghost_form_returns_a_criterion_too():
    model = mlp()
    criterion = nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(data(), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        n_public=RECORDS,
    )
    private_model, optimizer, loss, loader = made
    assert loss is criterion
    for inputs, targets in loader:
        loss(private_model(inputs), targets).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_runs_as_it_was_written(when: str):
    expected = usual()
    if when == "before":
        loop = private(torch.compile(mlp(), backend="eager"))
    else:
        loop = private()
        loop.model = torch.compile(loop.model, backend="eager")
    loop.train()
    assert torch.allclose(loop.weights, expected.weights, rtol=0, atol=1e-12)
