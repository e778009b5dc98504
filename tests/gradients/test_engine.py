"""Batches of any size: chunks, padding, several rows a record, what is not finite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpis.gradients import CouplingError, RecordGradients, SlowGradientsWarning, batches
from tests.gradients import oracles
from tests.gradients.problems import PROBLEMS, Problem, mlp

CLASSES = 4


def labelled(records: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(records, 6, dtype=dtype), torch.randint(0, CLASSES, (records,))


def ones(norms: Tensor, indices: Tensor) -> Tensor:
    return torch.ones_like(norms)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class TestChunks:
    @pytest.mark.parametrize("records", [1, 3, 4, 5, 11])
    def test_chunks_do_not_change_the_result(self, records: int) -> None:
        module, batch = mlp().double(), labelled(records, torch.float64)
        whole = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        chunked = RecordGradients(module, nn.CrossEntropyLoss(), chunk=4)(batch, ones)
        torch.testing.assert_close(chunked.norms, whole.norms())
        for name, expected in whole.weighted_sum(torch.ones(records)).items():
            torch.testing.assert_close(chunked.sums[name], expected)

    def test_weights_are_chosen_from_norms_and_indices(self) -> None:
        module, batch = mlp().double(), labelled(7, torch.float64)
        seen = []

        def weigh(norms: Tensor, indices: Tensor) -> Tensor:
            seen.append(indices)
            return indices / norms

        gradients = RecordGradients(module, nn.CrossEntropyLoss(), chunk=4)
        result = gradients(batch, weigh)
        assert torch.cat(seen).tolist() == list(range(7))
        expected = gradients.record(batch).weighted_sum(torch.arange(7) / result.norms)
        for name, value in expected.items():
            torch.testing.assert_close(result.sums[name], value)

    def test_a_batch_of_none_is_a_batch(self) -> None:
        module = mlp()
        result = RecordGradients(module, nn.CrossEntropyLoss())(labelled(0), ones)
        assert result.norms.shape == (0,)
        assert all(not value.any() for value in result.sums.values())
        assert result.sums.keys() == dict(module.named_parameters()).keys()

    def test_sums_are_double(self) -> None:
        result = RecordGradients(mlp(), nn.CrossEntropyLoss(), chunk=4)(labelled(9), ones)
        assert {value.dtype for value in result.sums.values()} == {torch.float64}

    def test_the_chunk_is_chosen_once_and_fits(self) -> None:
        gradients = RecordGradients(mlp(), nn.CrossEntropyLoss(), expected_records=1000)
        assert gradients.chunk(labelled(1000)) == gradients.chunk(labelled(3)) == 512

    def test_the_size_of_a_batch_never_decides_the_chunk(self) -> None:
        """It is private, and the chunk's shape shows in the last bits of every norm."""
        chunks = {
            RecordGradients(mlp(), nn.CrossEntropyLoss()).chunk(labelled(n)) for n in (3, 40, 999)
        }
        assert len(chunks) == 1
        expecting = RecordGradients(mlp(), nn.CrossEntropyLoss(), expected_records=20)
        assert expecting.chunk(labelled(20)) == expecting.chunk(labelled(3)) == 32


# Shapes that are ours: a norm may not change by one bit with the neighbours of a record.
FIXED_SHAPES = [p for p in PROBLEMS if "packed" not in p.id and not p.slow]


@pytest.mark.parametrize("problem", FIXED_SHAPES, ids=lambda problem: problem.id)
def test_a_norm_does_not_depend_on_who_shares_the_batch(problem: Problem) -> None:
    K = problem.rows_per_record
    module, batch = problem.module(), problem.batch(24 * K)
    gradients = RecordGradients(
        module, objective=problem.objective, rows_per_record=K, chunk=16, check=False
    )

    def norms(records: Tensor) -> Tensor:
        return gradients(batches.take(batch, batches.rows_of_records(records, K)), ones).norms

    everyone = norms(torch.arange(24))
    order = torch.randperm(24)
    assert torch.equal(norms(order), everyone[order])
    fewer = order[:7]
    assert torch.equal(norms(fewer), everyone[fewer])


class TestRows:
    def test_rows_that_only_fill_up_count_nothing(self) -> None:
        module = mlp().double()
        x, y = labelled(6, torch.float64)
        present = torch.tensor([[True, True, False], [True, False, False]])
        gradients = RecordGradients(module, nn.CrossEntropyLoss(), rows_per_record=3)
        tape = gradients.record((x, y), present)
        for record, rows in enumerate([[0, 1], [3]]):
            loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
            expected = torch.autograd.grad(loss, list(module.parameters()))
            total = torch.cat([g.flatten() for g in expected]).norm()
            torch.testing.assert_close(tape.norms()[record], total)

    def test_half_a_record_is_refused(self) -> None:
        gradients = RecordGradients(mlp(), nn.CrossEntropyLoss(), rows_per_record=3)
        with pytest.raises(ValueError, match="whole records of 3 rows; found 7"):
            gradients(labelled(7), ones)

    def test_missing_rows_in_chunks(self) -> None:
        module = mlp().double()
        batch = labelled(15, torch.float64)
        present = torch.rand(5, 3) < 0.7
        present[:, 0] = True
        whole = RecordGradients(module, nn.CrossEntropyLoss(), rows_per_record=3)
        chunked = RecordGradients(module, nn.CrossEntropyLoss(), rows_per_record=3, chunk=2)
        found = chunked(batch, ones, present)
        torch.testing.assert_close(found.norms, whole.record(batch, present).norms())


class TestNotFinite:
    def test_one_bad_record_does_no_harm(self) -> None:
        module = mlp().double()
        x, y = labelled(8, torch.float64)
        good = torch.arange(8) != 5
        expected = RecordGradients(module, nn.CrossEntropyLoss())((x[good], y[good]), ones)
        x[5, 0] = torch.inf
        found = RecordGradients(module, nn.CrossEntropyLoss(), chunk=4)((x, y), ones)
        assert not found.norms[5].isfinite()
        torch.testing.assert_close(found.norms[good], expected.norms)
        for name, value in expected.sums.items():
            torch.testing.assert_close(found.sums[name], value)

    def test_a_first_batch_of_bad_records(self) -> None:
        x, y = labelled(4)
        found = RecordGradients(mlp(), nn.CrossEntropyLoss())((x * torch.nan, y), ones)
        assert found.norms.isnan().all()
        assert all(not value.any() for value in found.sums.values())


class TestModes:
    def test_dropout_is_part_of_the_model(self) -> None:
        module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)).double()
        batch = labelled(5, torch.float64)
        gradients = RecordGradients(module, nn.CrossEntropyLoss())
        torch.manual_seed(1)
        tape = gradients.record(batch)
        assert module[1].training
        gradients = RecordGradients(module, nn.CrossEntropyLoss())
        gradients.record(batch)
        torch.manual_seed(1)
        fast = gradients.record(batch).weighted_sum(torch.ones(5))
        torch.manual_seed(1)
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="sum")
        plain = torch.autograd.grad(loss, list(module.parameters()))
        for value, expected in zip(fast.values(), plain, strict=True):
            torch.testing.assert_close(value, expected)
        assert tape.records == 5

    def test_looking_around_leaves_no_trace(self) -> None:
        module, batch = nn.Sequential(mlp(), nn.Dropout(0.5)), labelled(5)
        before = copy.deepcopy(module.state_dict())
        torch.manual_seed(2)
        RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        first = torch.rand(3)
        torch.manual_seed(2)
        module(batch[0])
        assert torch.equal(torch.rand(3), first)
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())

    def test_autocast_computes_factors_in_float32(self) -> None:
        module, batch = (
            nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, CLASSES)),
            labelled(8),
        )
        expected = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tape = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
            norms, sums = tape.norms(), tape.weighted_sum(torch.ones(8))
        assert {value.dtype for value in sums.values()} == {torch.float32}
        torch.testing.assert_close(norms, expected.norms(), rtol=0.05, atol=0.01)
        for record in range(8):  # norm and sum tell the same story to better than 5e-4
            alone = tape.weighted_sum((torch.arange(8) == record).float())
            total = torch.cat([value.flatten() for value in alone.values()]).double().norm()
            torch.testing.assert_close(norms[record], total, rtol=1e-5, atol=0.0)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making
    def test_a_compiled_module_runs_as_its_original(self) -> None:
        module, batch = mlp(), labelled(5)
        compiled = torch.compile(module)
        found = RecordGradients(compiled, nn.CrossEntropyLoss()).record(batch)
        expected = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        assert torch.equal(found.norms(), expected.norms())

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making
    def test_a_compiled_part_runs_as_it_was_written(self) -> None:
        module, batch = mlp(), labelled(5)
        expected = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        parts = nn.Sequential(torch.compile(module[0]), module[1], module[2])
        found = RecordGradients(parts, nn.CrossEntropyLoss()).record(batch)
        assert torch.equal(found.norms(), expected.norms())

    def test_sequences_may_change_their_length(self) -> None:
        problem = next(p for p in PROBLEMS if p.id == "embedding-of-positions")
        module = problem.module().double()
        gradients = RecordGradients(module, objective=problem.objective)
        for length in (3, 5, 2):
            batch = (torch.randint(0, 7, (6, length)),)
            expected = oracles.norms(oracles.by_loop(problem, module, batch))
            torch.testing.assert_close(gradients.record(batch).norms(), expected)


class TestLaterBatches:
    """What the first batch does not show is noticed at a later one."""

    def test_records_sorted_inside_the_model(self) -> None:
        class Sorted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 4)

            def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
                order = lengths.argsort(descending=True, stable=True)
                return self.outer(self.inner(x[order]).tanh()[order.argsort()])

        module, (x, y) = Sorted().double(), labelled(8)
        lengths = torch.tensor([7, 7, 7, 2, 5, 1, 6, 3])
        with pytest.warns(SlowGradientsWarning, match="differed"):
            found = RecordGradients(module, nn.CrossEntropyLoss(), chunk=8)(
                (x.double(), lengths, y), ones
            )
        for record in range(8):
            own = slice(record, record + 1)
            loss = nn.functional.cross_entropy(module(x[own].double(), lengths[own]), y[own])
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            norm = torch.stack([g.norm() for g in gradients]).norm()
            torch.testing.assert_close(found.norms[record], norm)

    def test_coupling_behind_a_gate_that_opens_later(self) -> None:
        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.linear = nn.Parameter(torch.zeros(1)), nn.Linear(6, 4)

            def forward(self, x: Tensor) -> Tensor:
                h = self.linear(x)
                return h + self.gate * h.detach().softmax(0)

        module = Gated()
        gradients = RecordGradients(module, nn.CrossEntropyLoss(), chunk=8)
        with pytest.warns(SlowGradientsWarning, match="differed"):
            gradients(labelled(8), ones)
        nn.init.constant_(module.gate, 3.0)
        x, y = labelled(8)
        with pytest.warns(SlowGradientsWarning, match="differed"):
            norms = gradients((x, y), ones).norms
        x[5] *= 9  # from then on each record is asked alone: another one's change does not show
        others = torch.arange(8) != 5
        assert torch.equal(gradients((x, y), ones).norms[others], norms[others])

    def test_batch_norm_put_back_into_training(self) -> None:
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()
        module[1].requires_grad_(False)
        gradients = RecordGradients(module, nn.CrossEntropyLoss())
        gradients(labelled(8), ones)
        module.train()
        with pytest.raises(CouplingError, match="'1'"):
            gradients(labelled(8), ones)

    @pytest.mark.parametrize(
        "change",
        [
            lambda module: setattr(module, "extra", nn.Parameter(torch.ones(1))),
            lambda module: next(module.parameters()).requires_grad_(False),
        ],
        ids=["added", "frozen"],
    )
    def test_a_module_that_changed(self, change: Callable[[nn.Module], object]) -> None:
        module = mlp()
        gradients = RecordGradients(module, nn.CrossEntropyLoss())
        gradients(labelled(8), ones)
        change(module)
        with pytest.raises(RuntimeError, match="new RecordGradients"):
            gradients(labelled(8), ones)


@pytest.mark.parametrize(("features", "hidden", "positions"), [(33, 65, 9), (301, 299, 3)])
@pytest.mark.parametrize("chunk", [16, 7])
def test_a_norm_keeps_its_bits_at_odd_sizes(
    features: int, hidden: int, positions: int, chunk: int
) -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x).tanh().mean(1))

    gradients = RecordGradients(Averaged(), nn.CrossEntropyLoss(), chunk=chunk)
    x, y = torch.randn(40, positions, features), torch.randint(0, CLASSES, (40,))
    norms = gradients((x, y), ones).norms
    for _ in range(3):
        some = torch.randperm(40)[:29]
        assert torch.equal(gradients((x[some], y[some]), ones).norms, norms[some])


@pytest.mark.parametrize("inplace", [lambda h, g: h.mul_(g), lambda h, g: h.__setitem__(0, g)])
def test_changes_in_place_with_a_parameter_are_refused(inplace: Callable[..., object]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).clone()
            inplace(h, self.scale)
            return h

    with pytest.raises(RuntimeError, match=r"in place.*scale"):
        RecordGradients(Scaled(), nn.CrossEntropyLoss())(labelled(8), ones)


def test_a_parameter_used_unseen_takes_the_slow_way() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(self.linear(x), self.scale)

    with pytest.warns(SlowGradientsWarning, match="cannot be seen"):
        RecordGradients(Custom(), nn.CrossEntropyLoss())(labelled(8), ones)
