"""Batches of any size: chunks, padding, several rows a record, what is not finite."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpis import batches
from dpis.errors import CouplingError, GradientError, InputError
from dpis.gradients import RecordGradients, SlowGradientsWarning
from dpis.gradients.record_gradients import LANES
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
        result = RecordGradients(mlp(), nn.CrossEntropyLoss(), chunk=LANES)(labelled(99), ones)
        assert {value.dtype for value in result.sums.values()} == {torch.float64}

    def test_the_chunk_is_chosen_once_and_fits(self) -> None:
        gradients = RecordGradients(mlp(), nn.CrossEntropyLoss())
        assert gradients.chunk(labelled(1000)) == gradients.chunk(labelled(3)) == 512

    @pytest.mark.parametrize("records", [1, 5, 100])
    def test_a_batch_that_fits_runs_as_it_is(self, records: int) -> None:
        """Copies that fill a chunk up would cost a small batch many times its price."""
        rows = []
        gradients = RecordGradients(mlp(), objective=_noting(rows), check=False)
        gradients.chunk(labelled(3))
        rows.clear()
        gradients(labelled(records), ones)
        assert rows == [records]

    def test_chunks_of_a_batch_are_about_equal(self) -> None:
        tapes = RecordGradients(mlp(), nn.CrossEntropyLoss(), chunk=8).tapes(labelled(20))
        assert [tape.records for tape in tapes] == [7, 7, 6]

    def test_memory_that_runs_out_halves_the_chunk(self) -> None:
        """The same records, each once, with the same random numbers as if chunks had been so small from the start."""
        dropped = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES)).double()
        batch, rows = labelled(12, torch.float64), []

        def with_room_for(most: int, chunk: int) -> RecordGradients:
            def objective(module: nn.Module, batch: Any) -> Tensor:
                if len(batch[1]) > most:
                    torch.rand(7)
                    raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to ...")
                return _noting(rows)(module, batch)

            return RecordGradients(dropped, objective=objective, chunk=chunk, check=False)

        scarce, plenty = with_room_for(3, 12), with_room_for(12, 3)
        for gradients in (scarce, plenty):
            gradients.chunk(labelled(3, torch.float64))
        rows.clear()
        torch.manual_seed(1)
        found = scarce(batch, ones)
        assert rows == [3, 3, 3, 3]
        torch.manual_seed(1)
        assert torch.equal(found.norms, plenty(batch, ones).norms)

    def test_another_error_is_not_taken_for_it(self) -> None:
        def objective(module: nn.Module, batch: Any) -> Tensor:
            if len(batch[1]) > 3:
                raise RuntimeError("something else")
            return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")

        with pytest.raises(RuntimeError, match="something else"):
            RecordGradients(mlp(), objective=objective, check=False)(labelled(5), ones)


def _noting(rows: list[int]) -> Callable[[nn.Module, Any], Tensor]:
    """An objective that notes how many rows it is given."""

    def objective(module: nn.Module, batch: Any) -> Tensor:
        rows.append(len(batch[1]))
        return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")

    return objective


class TestFixedShape:
    """Chunks of one shape: the last bits of a norm do not depend on who shares the batch."""

    def test_the_size_of_a_batch_never_decides_the_chunk(self) -> None:
        """It is private, and the chunk's shape shows in the last bits of every norm."""
        made = [self.gradients(expected_records=3000) for _ in range(3)]
        sizes = {one.chunk(labelled(n)) for one, n in zip(made, (3, 40, 999), strict=True)}
        assert sizes == {300 // LANES * LANES}

    def test_filling_up_costs_a_twentieth_at_most(self) -> None:
        for expected in (2560, 3000, 10_000):
            assert self.gradients(expected_records=expected).chunk(labelled(3)) <= expected / 10

    def test_chunks_are_whole_vectors_where_records_are_small(self) -> None:
        assert self.gradients(chunk=7).chunk(labelled(3)) == LANES
        wide = RecordGradients(
            nn.Linear(1 << 24, 1), nn.MSELoss(), chunk=7, fixed_shape=True, check=False
        )
        assert wide.chunk((torch.zeros(3, 1 << 24), torch.zeros(3, 1))) == 7

    def gradients(self, **settings: Any) -> RecordGradients:
        return RecordGradients(mlp(), nn.CrossEntropyLoss(), fixed_shape=True, **settings)


class TestBatchShaped:
    """What the mechanism writes into the ledger: whether a norm's last bits may depend on the neighbours."""

    def test_a_batch_that_runs_as_it_is(self) -> None:
        assert RecordGradients(mlp(), nn.CrossEntropyLoss()).batch_shaped(labelled(9))

    def test_shapes_that_are_ours(self) -> None:
        gradients = RecordGradients(mlp(), nn.CrossEntropyLoss(), fixed_shape=True)
        assert not gradients.batch_shaped(labelled(9))

    @pytest.mark.parametrize("name", ["lstm-packed", "gru-packed", "embedding-bag-offsets"])
    def test_shapes_that_follow_the_values(self, name: str) -> None:
        problem = next(p for p in PROBLEMS if p.id == name)
        gradients = RecordGradients(problem.module(), objective=problem.objective, fixed_shape=True)
        assert gradients.batch_shaped(problem.batch(8))

    def test_a_batch_cut_to_its_longest_record(self) -> None:
        class Cut(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(6, CLASSES)

            def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
                used = torch.arange(x.shape[1]) < lengths[:, None]
                longest = int(lengths.max())
                return (self.linear(x[:, :longest]) * used[:, :longest, None]).sum(1)

        batch = torch.randn(3, 5, 6), torch.tensor([1, 2, 4]), torch.tensor([0, 1, 2])
        assert RecordGradients(Cut(), nn.CrossEntropyLoss(), fixed_shape=True).batch_shaped(batch)

    def test_a_result_that_depends_on_the_place(self) -> None:
        class Placed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(6, CLASSES)

            def forward(self, x: Tensor) -> Tensor:
                last_bit = 1 + 2.0**-23 * (torch.arange(len(x)) == len(x) - 1)
                return self.linear(x) * last_bit[:, None]

        gradients = RecordGradients(Placed(), nn.CrossEntropyLoss(), fixed_shape=True)
        assert gradients.batch_shaped(labelled(9))


# Shapes that are ours: a norm may not change by one bit with the neighbours of a record.
FIXED_SHAPES = [p for p in PROBLEMS if "packed" not in p.id and not p.slow]


@pytest.mark.parametrize("problem", FIXED_SHAPES, ids=lambda problem: problem.id)
def test_a_norm_does_not_depend_on_who_shares_the_batch(problem: Problem) -> None:
    K = problem.rows_per_record
    module, batch = problem.module(), problem.batch(24 * K)
    gradients = RecordGradients(
        module,
        objective=problem.objective,
        rows_per_record=K,
        chunk=16,
        fixed_shape=True,
        check=False,
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
        with pytest.raises(InputError, match="whole records of 3 rows; found 7"):
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


class TestExtremes:
    class Scaled(nn.Module):
        """A linear layer whose output is scaled by a fixed number."""

        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, CLASSES), scale

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    @pytest.mark.parametrize("size", [1e18, 1e-18])
    def test_activations_whose_squares_exceed_float32(self, size: float) -> None:
        x, y = labelled(8)
        module = self.Scaled(1 / size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = RecordGradients(module, nn.CrossEntropyLoss())((x * size, y), ones).norms
        expected = RecordGradients(module.double(), nn.CrossEntropyLoss())(
            (x.double() * size, y), ones
        )
        torch.testing.assert_close(found, expected.norms, rtol=1e-5, atol=0.0)

    def test_gradients_that_all_but_vanish(self) -> None:
        norms = RecordGradients(self.Scaled(1e-25), nn.CrossEntropyLoss())(labelled(8), ones).norms
        assert (norms < 1e-18).all()


class TestModes:
    def test_what_a_checkpoint_runs_again_runs_as_before(self) -> None:
        class Checkpointed(nn.Module):
            def __init__(self, inner: nn.Module, again: bool) -> None:
                super().__init__()
                self.inner, self.outer, self.again = inner, nn.Linear(5, CLASSES), again

            def forward(self, x: Tensor) -> Tensor:
                if not self.again:
                    return self.outer(self.inner(x))
                return self.outer(checkpoint(self.inner, x, use_reentrant=False))

        inner = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Unflatten(1, (7, 1)), nn.Conv1d(7, 5, 1), nn.Flatten()
        )
        plain, batch = Checkpointed(inner, again=False), labelled(8)
        again = Checkpointed(inner, again=True)
        again.load_state_dict(plain.state_dict())
        expected = RecordGradients(plain, nn.CrossEntropyLoss())(batch, ones).norms
        assert torch.equal(
            RecordGradients(again, nn.CrossEntropyLoss())(batch, ones).norms, expected
        )

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

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making
    def test_a_compiled_module_runs_as_its_original(self) -> None:
        module, batch = mlp(), labelled(5)
        compiled = torch.compile(module)
        found = RecordGradients(compiled, nn.CrossEntropyLoss()).record(batch)
        expected = RecordGradients(module, nn.CrossEntropyLoss()).record(batch)
        assert torch.equal(found.norms(), expected.norms())

    @pytest.mark.slow
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


class Sorted(nn.Module):
    """Works on records from the longest to the shortest, and then restores their order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        return self.outer(self.inner(x[order]).tanh()[order.argsort()])


class TestLaterBatches:
    """What the first batch does not show is noticed at a later one."""

    def test_records_sorted_inside_the_model(self) -> None:
        """The three records that the plan is made from have equal lengths: they stay where they are."""
        x, y = labelled(8)
        lengths = torch.tensor([7, 7, 7, 2, 5, 1, 6, 3])
        with pytest.raises(CouplingError, match="stay in their places"):
            RecordGradients(Sorted(), nn.CrossEntropyLoss())((x, lengths, y), ones)

    @pytest.mark.parametrize("rows_per_record", [1, 2])
    def test_copies_that_fill_up_a_chunk_watch_for_moves_at_every_pass(
        self, rows_per_record: int
    ) -> None:
        gradients = RecordGradients(
            Sorted(),
            nn.CrossEntropyLoss(),
            rows_per_record=rows_per_record,
            fixed_shape=True,
        )
        x, y = labelled(8)
        for _ in range(2):  # the third pass is not one of those that are looked at closely
            gradients((x, torch.ones_like(y), y), ones)
        with pytest.raises(CouplingError, match="stay in their places"):
            gradients((x, torch.arange(8), y), ones)

    @pytest.mark.parametrize("name", ["lstm-packed", "gru-packed"])
    def test_packing_is_not_a_move(self, name: str) -> None:
        problem = next(p for p in PROBLEMS if p.id == name)
        module, batch = problem.module().double(), problem.batch(5)
        batch = batches.apply(lambda t: t.double() if t.is_floating_point() else t, batch)
        found = RecordGradients(module, objective=problem.objective)(batch, ones).norms
        expected = oracles.norms(oracles.by_loop(problem, module, batch))
        torch.testing.assert_close(found, expected)

    def test_two_records_that_meet(self) -> None:
        class Meeting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(6, CLASSES)

            def forward(self, x: Tensor) -> Tensor:
                own = self.linear(x)
                meets = (x[:, 0] > 2).nonzero()
                return own + 0.1 * (own[meets].sum(0) if len(meets) > 1 else 0.0)

        gradients = RecordGradients(Meeting(), nn.CrossEntropyLoss(), chunk=LANES)
        x, y = labelled(LANES)
        x[:, 0].clamp_(max=1)
        gradients((x, y), ones)
        x[[5, 8], 0] = 3
        with pytest.raises(CouplingError, match="stay in their places"):
            gradients((x, y), ones)

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
        with pytest.raises(GradientError, match="new RecordGradients"):
            gradients(labelled(8), ones)


class Averaged(nn.Module):
    """A layer on sequences, averaged, classified."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.layer, self.classify = layer, nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return self.classify(outputs.tanh().mean(1))


class SelfAttention(nn.MultiheadAttention):
    """With the weights asked for, the products are made one by one instead of by a fused kernel."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


def transformer(width: int, heads: int, inner: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, inner, dropout=0.0, batch_first=True)
    return Averaged(layer, width)


# Sizes at which vectors and rows do not begin on a boundary: input features, positions, model.
ODD_SIZES: dict[str, tuple[int, int, Callable[[], nn.Module]]] = {
    "linear": (33, 9, lambda: Averaged(nn.Linear(33, 65), 65)),
    "linear-wide": (301, 3, lambda: Averaged(nn.Linear(301, 299), 299)),
    "layer-norm": (33, 5, lambda: Averaged(nn.LayerNorm(33), 33)),
    "rnn": (5, 6, lambda: Averaged(nn.RNN(5, 7, batch_first=True), 7)),
    "rnn-single": (1, 6, lambda: Averaged(nn.RNN(1, 1, batch_first=True), 1)),
    "gru": (5, 6, lambda: Averaged(nn.GRU(5, 7, batch_first=True), 7)),
    "lstm": (5, 6, lambda: Averaged(nn.LSTM(5, 7, batch_first=True), 7)),
    "lstm-large-weights": (33, 3, lambda: Averaged(nn.LSTM(33, 17, batch_first=True), 17)),
    "lstm-even": (6, 5, lambda: Averaged(nn.LSTM(6, 50, batch_first=True), 50)),
    "lstm-projected": (5, 6, lambda: Averaged(nn.LSTM(5, 7, proj_size=3, batch_first=True), 3)),
    "lstm-two-layers": (
        5,
        6,
        lambda: Averaged(nn.LSTM(5, 7, 2, bidirectional=True, batch_first=True), 14),
    ),
    "attention": (9, 5, lambda: Averaged(SelfAttention(9, 3, batch_first=True), 9)),
    "transformer": (10, 6, lambda: transformer(10, 2, 13)),
    "transformer-one-head": (7, 5, lambda: transformer(7, 1, 11)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("chunk", [16, 7])
@pytest.mark.parametrize("name", ODD_SIZES)
@pytest.mark.slow
def test_a_norm_keeps_its_bits_at_odd_sizes(name: str, chunk: int) -> None:
    features, positions, model = ODD_SIZES[name]
    gradients = RecordGradients(
        model(), nn.CrossEntropyLoss(), chunk=chunk, fixed_shape=True, check=False
    )
    x, y = torch.randn(40, positions, features), torch.randint(0, CLASSES, (40,))
    norms = gradients((x, y), ones).norms
    for _ in range(3):
        some = torch.randperm(40)[:29]
        assert torch.equal(gradients((x[some], y[some]), ones).norms, norms[some])
    assert not gradients.batch_shaped((x, y))


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

    with pytest.raises(GradientError, match=r"in place.*scale"):
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
