"""Every way to drive a private loop wrongly is an error that says what it would cost, and what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dpis import BatchMemoryManager, PrivacyEngine
from dpis.dropin import MisuseError
from dpis.errors import BudgetExceededError, CouplingError, InputError
from dpis.options import Privacy
from tests.forks import error_in_a_fork, needs_fork

from .loops import BATCH, RECORDS, data, first_batch, mlp, private

# ── the wrong optimizer, the wrong model ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["appended", "a group"])
def test_parameters_given_to_the_optimizer_later_are_not_stepped(how: str):
    """By a gradient that is neither clipped nor noised."""
    loop, stranger = private(), nn.Parameter(torch.zeros(1).double())
    _, inputs, targets = first_batch(loop)
    if how == "appended":
        loop.optimizer.param_groups[0]["params"].append(stranger)
    else:
        loop.plain_optimizer.add_param_group({"params": [stranger]})
    before = loop.weights
    functional.cross_entropy(loop.model(inputs), targets).backward()
    (stranger * inputs.sum()).sum().backward()
    spent = len(loop.engine.accountant)
    with pytest.raises(MisuseError, match="given parameters after make_private"):
        loop.optimizer.step()
    assert float(stranger.detach()) == 0
    assert torch.equal(loop.weights, before)
    assert len(loop.engine.accountant) == spent


def test_the_original_optimizer_cannot_be_stepped():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    before = loop.weights
    with pytest.raises(MisuseError, match=r"neither clipped nor noised.*make_private returned"):
        loop.plain_optimizer.step()
    assert torch.equal(loop.weights, before)


def test_the_optimizer_of_another_private_model_cannot_be_stepped():
    loop, other = private(), private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(MisuseError, match=r"without a batch.*without being accounted for"):
        other.optimizer.step()


def test_a_new_optimizer_finds_no_gradient_but_the_one_that_was_released():
    loop = private()
    loop.step(*next(iter(loop.loader)))
    before, noisy = loop.weights, loop.gradient
    torch.optim.SGD(loop.model.parameters(), lr=1.0).step()
    assert torch.allclose(loop.weights, before - noisy, rtol=0, atol=1e-12)


def test_an_optimizer_of_another_model_is_refused():
    loader = DataLoader(data(), batch_size=BATCH)
    for parameters, what in [
        (mlp().parameters(), "does not step"),
        ((model := mlp())[0].parameters(), "does not step 2.weight"),
    ]:
        with pytest.raises(InputError, match=rf"{what}.*what is trained must be"):
            PrivacyEngine().make_private(
                module=model if "2.weight" in what else mlp(),
                optimizer=torch.optim.SGD(parameters, lr=0.1),
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                n_public=RECORDS,
            )


def test_an_optimizer_cannot_be_given_more_parameters_later():
    with pytest.raises(MisuseError, match="neither clipped nor noised"):
        private().optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_an_optimizer_that_looks_several_times_is_refused():
    with pytest.raises(InputError, match="LBFGS"):
        private(optimizer=lambda p: torch.optim.LBFGS(p))


# ── the wrong order ──────────────────────────────────────────────────────────────────────────────────


def test_the_next_batch_needs_a_step_first():
    loop = private()
    batches, *_ = first_batch(loop)
    with pytest.raises(
        MisuseError, match=r"before optimizer.step\(\).*Call optimizer.step\(\) for"
    ):
        next(batches)


def test_the_last_batch_needs_a_step_too():
    loop = private()
    batches = iter(loop.loader)
    for _ in range(len(loop.loader) - 1):
        loop.step(*next(batches))
    next(batches)
    with pytest.raises(MisuseError, match=r"before optimizer.step"):
        next(batches)


def test_a_step_needs_a_batch():
    loop = private()
    with pytest.raises(MisuseError, match="without a batch"):
        loop.optimizer.step()
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        with pytest.raises(MisuseError, match="without a batch"):
            loop.optimizer.step()
        break


def test_a_forward_pass_needs_its_backward_pass():
    loop = private()
    _, inputs, _ = first_batch(loop)
    loop.model(inputs)
    with pytest.raises(MisuseError, match="without backward"):
        loop.optimizer.step()


def test_gradients_dropped_before_the_step_are_missed():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    loop.optimizer.zero_grad()
    with pytest.raises(MisuseError, match="dropped by zero_grad"):
        loop.optimizer.step()
    assert len(loop.engine.accountant) == loop.session.mechanism.step


def test_a_part_of_a_batch_is_not_enough():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs[:1]), targets[:1]).backward()
    with pytest.raises(MisuseError, match=r"had no forward and backward pass.*who is sampled"):
        loop.optimizer.step()


def test_a_second_view_is_of_the_whole_batch():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    with pytest.raises(MisuseError, match=r"count twice.*no_grad"):
        loop.model(inputs[:1])


def test_parts_have_no_second_view():
    """They are told by where they are in the batch, which says nothing once all of it was seen."""
    loop = private()
    _, inputs, targets = first_batch(loop)
    for part in (slice(0, 1), slice(1, None)):
        functional.cross_entropy(loop.model(inputs[part]), targets[part]).backward()
    with pytest.raises(MisuseError, match=r"count twice|another order"):
        loop.model(inputs)


def test_parts_are_differentiated_one_by_one():
    loop = private()
    _, inputs, _ = first_batch(loop)
    loop.model(inputs[:1])
    with pytest.raises(MisuseError, match=r"scaled by the number of drawn records.*private"):
        loop.model(inputs[1:])


SHARES = {
    "len(part) / len(batch)": lambda loss, part, batch: loss * len(part) / len(batch),
    "one share": lambda loss, part, batch: (len(part) / len(batch)) * loss,
    "one of so many parts": lambda loss, part, batch: loss / -(-len(batch) // len(part)),
}


@pytest.mark.parametrize("scaled", SHARES.values(), ids=SHARES)
def test_parts_scaled_by_their_share_of_the_batch(scaled: Any):
    """They gave a quarter of the update, and nothing was said."""
    loop = private(loader={"batch_size": 32}, method="dp-sgd")
    _, inputs, targets = first_batch(loop)
    part, labels = next(zip(inputs.split(5), targets.split(5), strict=True))
    loss = functional.cross_entropy(loop.model(part), labels)
    with pytest.raises(MisuseError, match="plain mean over each part"):
        scaled(loss, part, inputs).backward()


def test_parts_of_a_loss_with_a_weight_of_its_own_add_up():
    """A weight of the loss is kept, as it would be without parts."""
    whole, parts = (private(loader={"batch_size": 32}, max_grad_norm=50.0) for _ in range(2))
    _, inputs, targets = first_batch(whole)
    (0.7 * functional.cross_entropy(whole.model(inputs), targets)).backward()
    whole.optimizer.step()
    first_batch(parts)
    for part, labels in zip(inputs.split(5), targets.split(5), strict=True):
        (0.7 * functional.cross_entropy(parts.model(part), labels)).backward()
    parts.optimizer.step()
    torch.testing.assert_close(whole.weights, parts.weights)


def test_the_adaptive_noise_is_not_known_beforehand():
    loop = private(epochs=2, method="dpis-adaptive")
    with pytest.raises(InputError, match="when it begins"):
        _ = loop.optimizer.noise_multiplier
    loop.train()
    assert loop.optimizer.noise_multiplier > 0


def test_two_iterations_do_not_mix():
    loop = private()
    older, *_ = first_batch(loop)
    newer = iter(loop.loader)
    loop.step(*next(newer))
    with pytest.raises(MisuseError, match="one iteration at a time"):
        next(older)
    loop.step(*next(newer))


def test_a_step_past_the_end_of_the_plan():
    loop = private(epochs=1, target_epsilon=3.0).train()
    with pytest.raises(BudgetExceededError, match="not covered by the claim"):
        next(iter(loop.loader))
    assert loop.engine.get_epsilon(1e-3) <= 3.0


# ── batches that were not drawn ──────────────────────────────────────────────────────────────────────


def test_a_batch_without_any_draw_is_looked_at_and_not_trained_on():
    loop = private()
    outputs = loop.model(torch.randn(3, 4).double())
    assert outputs.argmax(1).shape == (3,)
    with pytest.raises(MisuseError, match=r"did not come from the private loader.*not be private"):
        outputs.sum().backward()
    assert all(p.grad is None for p in loop.plain_model.parameters())
    loop.train()
    assert loop.model(torch.randn(3, 4).double()).shape == (3, 3)  # after the loop, too


def test_more_rows_than_were_drawn():
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match=r"count twice|other records"):
        loop.model(torch.cat([inputs, inputs]))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.randn_like(x),
        lambda x: x.flip(0),
        lambda x: 0.5 * x + 0.5 * x.roll(1, 0),
        lambda x: x.mul_(2.0),
    ],
    ids=["other records", "another order", "mixed", "changed in place"],
)
def test_as_many_rows_as_were_drawn_with_other_contents(change: Any):
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match=r"other records than the loader delivered.*clip norm"):
        loop.model(change(inputs))


def test_parts_in_another_order():
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match="another order"):
        loop.model(inputs[1:])


def test_changed_records_are_taken_if_the_user_says_so():
    loop = private(inputs_as_delivered=False)
    for inputs, targets in loop.loader:
        loop.step(2 * inputs, targets)


def test_inputs_of_another_form_cannot_be_told():
    loop = private(mlp(torch.float32))
    for inputs, targets in loop.loader:
        loop.step(inputs.float(), targets)


def test_inputs_that_require_gradients_are_refused():
    loop = private()
    _, inputs, _ = first_batch(loop)
    with pytest.raises(MisuseError, match="neither be trained nor be protected"):
        loop.model(inputs.clone().requires_grad_())


# ── loaders ──────────────────────────────────────────────────────────────────────────────────────────


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from ()


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return super().__iter__()


class OwnSampler(RandomSampler):
    pass


def refuse_loader(loader: Any, match: str) -> None:
    model = mlp()
    engine = PrivacyEngine()
    arguments = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(InputError, match=match):
        engine.make_private(
            **arguments,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            n_public=RECORDS,
        )
    assert not engine.is_compatible(**arguments, data_loader=loader)


def test_loaders_that_cannot_be_accounted_for():
    records = data()
    weights = WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    in_batches = torch.utils.data.BatchSampler(SequentialSampler(records), 4, drop_last=False)
    refuse_loader(DataLoader(records, batch_size=4, sampler=weights), "epsilon would be silently")
    refuse_loader(DataLoader(records, batch_size=4, sampler=OwnSampler(records)), "OwnSampler")
    refuse_loader(
        DataLoader(records, batch_size=4, sampler=RandomSampler(records, replacement=True)),
        "nobody accounts",
    )
    refuse_loader(
        DataLoader(records, batch_size=4, sampler=RandomSampler(records, num_samples=9)), "Subset"
    )
    refuse_loader(
        DataLoader(records, batch_size=4, sampler=SequentialSampler(range(9))), "9 of 40 records"
    )
    refuse_loader(DataLoader(records, batch_sampler=in_batches), "who is drawn is not known")
    refuse_loader(DataLoader(records, batch_size=None), "needs a batch_size")
    refuse_loader(DataLoader(Endless(), batch_size=4), "independent coins")
    refuse_loader(OwnLoader(records, batch_size=4), "OwnLoader")
    refuse_loader(private().loader, "private already")


# ── options ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"poisson_sampling": False}, "epsilon would be wrong"),
        ({"clipping": "per_layer", "max_grad_norm": [3.0, 4.0]}, "flat.*max_grad_norm=5,"),
        ({"clipping": "adaptive"}, "release of its own.*dpis.train.*dpis.schedulers"),
        ({"max_grad_norm": [1.0, 1.0]}, "max_grad_norm=1.41421"),
        ({"noise_generator": torch.Generator()}, "predicted"),
        ({"wrap_model": False}, "module that make_private returns"),
        ({"rand_on_empty": True}, "noise alone"),
        ({"grad_sample_mode": "ghost_fsdp"}, "hooks, ghost"),
        ({"loss_reduction": "none"}, "mean or sum"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "scaled by the size"),
        ({"total_steps": 9}, "total_steps"),
        ({"method": "weighted"}, "method must be one of dpis"),
        ({"noise_multiplier": 0.001}, "noise"),
        ({"kappa": "1:0.4"}, "without a horizon"),
        ({"headroom": 0.5}, "at least 1"),
        ({"method": "dpis-adaptive"}, "plans its noise for a horizon"),
        ({"method": "sgd"}, "not private"),
        ({"accountant": "rdp"}, "no effect where the noise is given"),
        ({"epochs": 2, "method": "dp-sgd", "headroom": 2.0}, "headroom has no effect on dp-sgd"),
        ({"epochs": 2, "method": "dpis-adaptive", "norm_sum": "full-pass"}, "as last seen"),
        ({"epochs": 2, "clip_ceiling": 2.0}, "Use dpis.train"),
        ({"epochs": 2, "release_n": True}, "Use dpis.train"),
        ({"epochs": 2, "epsilon": 1.0}, "called target_epsilon"),
        ({"epochs": 2, "privacy": Privacy(epsilon=1.0)}, "epsilon is said twice"),
        ({"privacy": Privacy(headroom=2.0), "headroom": 3.0}, "headroom is said twice"),
        ({"epochs": 2, "poisson_sampling": False}, "epsilon would be wrong"),
        ({"epochs": 2, "alphas": [2, 3]}, "alphas"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_options_that_are_not_honoured_are_refused(options: dict[str, Any], match: str):
    model = mlp()
    with pytest.raises(InputError, match=match):
        private(model, **options)
    model(data()[:3][0]).sum().backward()  # nothing was changed


def test_unknown_accountants_are_refused():
    with pytest.raises(InputError, match="prv, rdp, gdp or pld"):
        PrivacyEngine(accountant="moments")


def test_a_private_model_is_not_made_private_again():
    with pytest.raises(InputError, match="private already"):
        private(private().model)


# ── models ───────────────────────────────────────────────────────────────────────────────────────────


def test_models_that_cannot_be_made_private():
    with pytest.raises(CouplingError, match="guarantee does not hold"):
        private(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    with pytest.raises(InputError, match="evaluation mode"):
        private(mlp().eval())
    with pytest.raises(InputError, match=r"DataParallel.*torchrun"):
        private(nn.DataParallel(mlp()))


def replace_head(model: nn.Module) -> None:
    model[2] = nn.Linear(6, 3).double()


def freeze_head(model: nn.Module) -> None:
    model[2].requires_grad_(False)


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3).double())


@pytest.mark.parametrize("change", [replace_head, add_layer])
def test_a_model_changed_after_wrapping(change: Any):
    loop = private()
    change(loop.plain_model)
    _, inputs, _ = first_batch(loop)
    with pytest.raises(
        MisuseError, match=r"changed after make_private.*neither clipped nor noised"
    ):
        loop.model(inputs)


def test_a_model_that_is_frozen_in_the_middle_of_a_step():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    freeze_head(loop.plain_model)
    with pytest.raises(MisuseError, match=r"middle of a step.*neither clipped nor noised"):
        loop.model(inputs)
    with pytest.raises(MisuseError, match=r"middle of a step.*neither clipped nor noised"):
        loop.optimizer.step()


def test_records_where_nobody_was_drawn():
    loop = private(dataset=TensorDataset(*data()[:2]), n_public=4000, loader={"batch_size": 1})
    inputs, _ = next(iter(loop.loader))
    assert len(inputs) == 0
    with pytest.raises(MisuseError, match="0 records were drawn"):
        loop.model(data()[:2][0])


def test_copies_can_be_evaluated_and_not_trained():
    loop = private().train(steps=1)
    _, inputs, _ = first_batch(loop)
    for clone in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        assert torch.equal(clone.eval()(inputs), loop.plain_model(inputs))
        with pytest.raises(MisuseError, match="would not be private"):
            clone.train()(inputs)


def test_optimizers_and_loaders_cannot_be_copied():
    loop = private()
    for what in (loop.optimizer, loop.loader, loop.session):
        with pytest.raises(MisuseError, match="cancel"):
            copy.deepcopy(what)
    with pytest.raises(MisuseError):
        pickle.dumps(loop.optimizer)


def test_a_model_taken_out_of_private_training():
    loop = private().train(steps=2)
    batches, inputs, targets = first_batch(loop)
    model = loop.model.to_standard_module()
    functional.cross_entropy(model(inputs), targets).backward()  # as any other model
    with pytest.raises(MisuseError, match="would not be accounted for"):
        loop.model(inputs)
    with pytest.raises(MisuseError, match=r"one iteration at a time|not be accounted"):
        next(batches)
    with pytest.raises(MisuseError, match="not be accounted"):
        loop.optimizer.step()


def test_a_memory_manager_wants_private_things():
    loop = private()
    for loader, optimizer in [
        (DataLoader(data(), batch_size=2), loop.optimizer),
        (loop.loader, loop.plain_optimizer),
    ]:
        with pytest.raises(InputError, match="make_private returned"):
            BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with pytest.raises(InputError, match="at least 1"):
        BatchMemoryManager(
            data_loader=loop.loader, max_physical_batch_size=0, optimizer=loop.optimizer
        )


# ── a second process ─────────────────────────────────────────────────────────────────────────────────


@needs_fork
@pytest.mark.parametrize("workers", [0, 2])
def test_a_child_process_cannot_go_on_with_the_parents_engine(workers: int):
    loop = private(loader={"num_workers": workers})
    said = error_in_a_fork(loop.train)
    assert "noise" in said
    assert "cancel" in said
    assert "make_private" in said
    loop.train()  # the parent goes on, and its workers are forks too


@needs_fork
def test_a_child_process_cannot_take_the_step_of_a_batch_that_was_drawn_before():
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets).backward()
    before = loop.weights

    def step_in_vain() -> None:
        with pytest.raises(InputError, match="cancel"):
            loop.optimizer.step()
        assert torch.equal(loop.weights, before)
        assert len(loop.engine.accountant) == 0

    assert not error_in_a_fork(step_in_vain)
    loop.optimizer.step()


@needs_fork
def test_a_child_process_that_makes_its_own_engine_trains():
    assert not error_in_a_fork(lambda: private().train())
