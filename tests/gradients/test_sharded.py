"""A model sharded over two processes has the per-example gradients of the same model in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from dpis.errors import DpisError
from dpis.gradients.deferred import DeferredGradients
from dpis.gradients.factors import Outer
from dpis.gradients.record_gradients import RecordGradients
from dpis.noise import add_noise, layout
from dpis.randomness import Key
from tests.gradients.memory import meter
from tests.gradients.sharded_models import (
    CASES,
    Case,
    Residual,
    Sharded,
    built,
    case,
    inverse,
    mesh,
    no_warnings,
    relative,
    sharded,
)
from tests.ranks import on_ranks, outcomes_on_ranks

pytestmark = pytest.mark.slow  # two processes for half a minute

EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
RECORDS = 11
FAST = ["mlp", "transformer", "convolutions", "adapters", "odd"]


def shares(cut: int) -> list[slice]:
    """Whose records are whose: the first so many are rank 0's."""
    return [slice(0, cut), slice(cut, None)]


def cut_out(batch: Any, own: slice) -> Any:
    return tuple(tensor[own] for tensor in batch)


# -- norms and sums --------------------------------------------------------------------------------


def errors_of(
    rank: int, names: list[str], dtype: torch.dtype, cuts: list[int], dropped: int | None = None
) -> dict[Any, tuple[float, float]]:
    """Of norms and of sums, by model and cut."""
    with no_warnings():
        return {
            (name, cut): error
            for name in names
            for cut, error in _errors(rank, case(name), dtype, cuts, dropped)
        }


def _errors(
    rank: int, own: Case, dtype: torch.dtype, cuts: list[int], dropped: int | None
) -> Iterator[tuple[int, tuple[float, float]]]:
    gradients = RecordGradients(sharded(own, dtype), nn.CrossEntropyLoss(), chunk=3)
    mine, whole = (
        Sharded(gradients, dropped),
        RecordGradients(built(own, dtype), nn.CrossEntropyLoss(), chunk=3),
    )
    for cut in cuts:
        torch.manual_seed(cut)
        batch = own.rows(RECORDS, dtype)
        right, here = whole(batch, inverse), shares(cut)[rank]
        norms, sums = mine.of(cut_out(batch, here))
        yield cut, (relative(norms, right.norms[here]), mine.error(sums, right.sums))


def require_exact(found: dict[Any, tuple[float, float]], most: float) -> None:
    for key, (norms, sums) in found.items():
        assert norms < most, (key, norms)
        assert sums < most, (key, sums)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What each scenario gave, on every rank: two processes start once for all of them."""
    by_rank = on_ranks(2, all_scenarios, seconds=120.0)
    return {name: [own[name] for own in by_rank] for name in by_rank[0]}


def all_scenarios(rank: int) -> dict[str, Any]:
    return {
        "exact": errors_of(rank, FAST, torch.float64, [4, 0]),
        "dropped": errors_of(rank, ["mlp"], torch.float64, [4], dropped=1),
        "step": one_step(rank),
        "between": between_passes(rank),
        "late": norms_over_time(rank),
        "policies": by_policy(rank),
        "refusals": refusals(rank),
        "deferred": deferred(rank),
        "peaks": peaks(rank),
        "looks": looks(rank),
        "replicated": replicated(rank),
    }


def test_norms_and_sums_are_those_of_one_process(found: dict[str, list[Any]]) -> None:
    """The second draw has no record on rank 0, and the first has fewer chunks there."""
    for errors in found["exact"]:
        assert len(errors) == 2 * len(FAST)
        require_exact(errors, EXACT[torch.float64])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", [own.id for own in CASES])
def test_however_records_are_shared_out(name: str, dtype: torch.dtype) -> None:
    for cuts in ([0, 4], [RECORDS, 1, 0]):
        for errors in on_ranks(2, errors_of, [name], dtype, cuts):
            require_exact(errors, EXACT[dtype])


def test_a_dropped_sum_shows(found: dict[str, list[Any]]) -> None:
    """Broken on purpose: rank 1 adds nothing."""
    for errors in found["dropped"]:
        assert errors["mlp", 4][1] > 0.1


# -- a step ----------------------------------------------------------------------------------------


def one_step(rank: int) -> dict[str, float]:
    """The largest differences between a sharded step and one in a single process."""
    own = case("mlp")
    module, whole = sharded(own), built(own, torch.float64)
    mine = Sharded(RecordGradients(module, nn.CrossEntropyLoss(), chunk=3))
    torch.manual_seed(1)
    batch = own.rows(RECORDS, torch.float64)
    _, local = mine.of(cut_out(batch, shares(4)[rank]))
    sums = RecordGradients(whole, nn.CrossEntropyLoss(), chunk=3)(batch, inverse).sums
    sizes = {name: value.numel() for name, value in sums.items()}

    def normals() -> Any:
        return Key(bytes(32)).normals("noise", 0, sum(sizes.values()))

    local = add_noise(local, 0.5, normals(), begins=mine.sums.begins(layout(sizes)))
    full = add_noise(sums, 0.5, normals())
    for name, gradient in mine.sums.as_gradients(local).items():
        module.get_parameter(name).grad = gradient
    for name, value in full.items():
        whole.get_parameter(name).grad = value
    for stepped in (module, whole):
        torch.optim.Adam(stepped.parameters(), lr=0.1).step()
    right = dict(whole.named_parameters())
    return {
        name: float((p.full_tensor() - right[name]).detach().abs().max())
        for name, p in module.named_parameters()
        if isinstance(p, DTensor)
    }


def test_a_step_is_that_of_one_process_noise_included(found: dict[str, list[Any]]) -> None:
    for own in found["step"]:
        assert len(own) == 6
        assert all(error < 1e-12 for error in own.values()), own


def norms_over_time(rank: int) -> list[Any]:
    """Rank 1 has no record at first; what its first record teaches is then learned by all."""
    own = case("flat")
    mine = Sharded(RecordGradients(sharded(own), nn.CrossEntropyLoss(), chunk=3))
    whole = RecordGradients(built(own, torch.float64), nn.CrossEntropyLoss(), chunk=3)
    found = []
    for step, cut in enumerate((0, 0, 4, RECORDS, 0)):
        torch.manual_seed(step)
        batch = own.rows(RECORDS, torch.float64)
        right, here = whole(batch, inverse), shares(RECORDS - cut)[rank]
        norms, sums = mine.of(cut_out(batch, here))
        found.append((relative(norms, right.norms[here]), mine.error(sums, right.sums)))
    return found


def test_a_rank_may_meet_its_first_record_late(found: dict[str, list[Any]]) -> None:
    for own in found["late"]:
        require_exact(dict(enumerate(own)), EXACT[torch.float64])


def between_passes(rank: int) -> list[tuple[float, float]]:
    """What people do to a model between two steps."""
    own = case("transformer")
    module, whole = built(own, torch.float64), built(own, torch.float64)
    for block in module.blocks:
        fully_shard([block.up, block.down], mesh=mesh())
    fully_shard(module, mesh=mesh())
    held = dict(module.named_parameters())  # as an optimizer has them
    mine = Sharded(RecordGradients(module, nn.CrossEntropyLoss(), chunk=3))
    oracle = RecordGradients(whole, nn.CrossEntropyLoss(), chunk=3)
    torch.manual_seed(0)
    batch = own.rows(RECORDS, torch.float64)

    def evaluated() -> None:
        with torch.no_grad():
            module(batch[0])

    def updated() -> None:
        evaluated()  # which leaves the root gathered
        with torch.no_grad():
            for parameter in [*held.values(), *whole.parameters()]:
                parameter.mul_(0.9)

    def stored() -> None:
        module.load_state_dict(module.state_dict())

    def gone_backward() -> None:
        nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()

    def kept() -> None:
        module.set_reshard_after_backward(False)

    found = []
    for event in (lambda: None, updated, stored, gone_backward, kept, updated):
        event()
        right, here = oracle(batch, inverse), shares(4)[rank]
        norms, sums = mine.of(cut_out(batch, here))
        found.append((relative(norms, right.norms[here]), mine.error(sums, right.sums)))
    return found


def test_what_happens_between_passes_leaves_no_trace(found: dict[str, list[Any]]) -> None:
    for errors in found["between"]:
        require_exact(dict(enumerate(errors)), EXACT[torch.float64])


# -- what FSDP2 can be told ------------------------------------------------------------------------


def by_policy(rank: int) -> dict[str, tuple[float, float]]:
    policies: dict[str, dict[str, Any]] = {
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    }
    found, own = {}, case("transformer")
    for name, how in policies.items():
        module = sharded(own, torch.float32, **how)
        mine = Sharded(RecordGradients(module, nn.CrossEntropyLoss(), chunk=3))
        whole = RecordGradients(built(own, torch.float32), nn.CrossEntropyLoss(), chunk=3)
        torch.manual_seed(0)
        batch = own.rows(RECORDS, torch.float32)
        right, here = whole(batch, inverse), shares(4)[rank]
        norms, sums = mine.of(cut_out(batch, here))
        found[name] = relative(norms, right.norms[here]), mine.error(sums, right.sums)
    return found


def test_policies(found: dict[str, list[Any]]) -> None:
    """In bf16 gradients are rounded, and norms fit the sums all the same: both are in float32."""
    for own in found["policies"]:
        require_exact({name: own[name] for name in ("offload", "kept")}, 1e-5)
        require_exact({"bf16": own["bf16"]}, 0.05)


def refusals(rank: int) -> dict[str, str]:
    """What is said about models that cannot be treated."""

    def said(module: nn.Module, run: bool = False) -> str:
        try:
            gradients = RecordGradients(module, nn.CrossEntropyLoss())
            if run:
                list(gradients.tapes((torch.randn(3, 6), torch.tensor([0, 1, 0]))))
        except DpisError as error:
            return str(error)
        return ""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 4))

    blocks_only, two = model(), model()
    fully_shard(blocks_only[1], mesh=mesh())
    fully_shard(two, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")))
    columns, ignoring, passing, hidden = model(), model(), Passing(), Hidden()
    returning = Returning()
    fully_shard(columns, mesh=mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(ignoring, mesh=mesh(), ignored_params={ignoring[2].bias})
    for part in (passing.inner, passing, returning.inner, returning, hidden):
        fully_shard(part, mesh=mesh())
    return {
        "no root": said(blocks_only),
        "two dimensions": said(two),
        "columns": said(columns),
        "ignored": said(ignoring),
        "passed on": said(passing, run=True),
        "returned": said(returning, run=True),
        "hidden": said(hidden, run=True),
    }


class Shifted(nn.Module):
    """Adds what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x) + shift


class Passing(nn.Module):
    """Computes something from a parameter, and passes it into a sharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = Shifted(), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.shift.exp())


class Returning(nn.Module):
    """A sharded module that returns what depends on no record."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = nn.Linear(2, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.inner(torch.ones(2)).tanh()


class Hidden(nn.Module):
    """A parameter that no function of torch is seen to use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.layer(x), self.factor)


class Scaled(torch.autograd.Function):
    """A product that goes round torch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum(0)


def test_what_cannot_be_treated_is_refused_in_plain_words(found: dict[str, list[Any]]) -> None:
    for said in found["refusals"]:
        assert "fully_shard(model)" in said["no root"]
        assert "one-dimensional mesh" in said["two dimensions"]
        assert "placed by" in said["columns"]
        assert "2.bias is not sharded at all" in said["ignored"]
        assert "passed into Shifted" in said["passed on"]
        assert "inner" in said["returned"]
        assert "Leave out fully_shard" in said["returned"]
        assert "factor" in said["hidden"]


# -- one rank stops all ---------------------------------------------------------------------------


def coupled_here(rank: int) -> None:
    """In rank 1's records alone, a value in one decides about the others."""
    own = case("mlp")
    module = sharded(own)

    def objective(module: nn.Module, batch: Any) -> Tensor:
        losses = functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return losses * (1 + losses.detach().mean()) if rank else losses

    gradients = RecordGradients(module, objective=objective)
    list(gradients.tapes(own.rows(6, torch.float64)))


def wrong_here(rank: int) -> None:
    """Rank 1's fast gradients are off."""
    own = case("mlp")
    module = sharded(own)
    if rank:
        right = Outer.block_sum
        Outer.block_sum = lambda self, weights: 1.1 * right(self, weights)  # type: ignore[method-assign]
    gradients = RecordGradients(module, nn.CrossEntropyLoss())
    list(gradients.tapes(own.rows(6, torch.float64)))


@pytest.mark.parametrize(
    ("broken", "cause"), [(coupled_here, "depend on one another"), (wrong_here, "plain autograd")]
)
def test_what_is_wrong_on_one_rank_stops_both(broken: Callable[[int], None], cause: str) -> None:
    first, second = outcomes_on_ranks(2, broken, seconds=20.0)
    assert not first[0]
    assert not second[0]
    assert "rank 1 stopped" in first[1]
    assert all(cause in text for _, text in (first, second))


# -- memory ----------------------------------------------------------------------------------------


def peaks(rank: int) -> tuple[float, float]:
    """The most bytes of large tensors at once, as a part of all parameters; and that of one sharded module."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Residual(64) for _ in range(8)), nn.Flatten(), nn.Linear(128, 2))
    whole, block = (sum(p.nbytes for p in m.parameters()) for m in (module, module[0]))
    for layer in module[:8]:
        fully_shard(layer, mesh=mesh())
    fully_shard(module, mesh=mesh())
    mine = Sharded(RecordGradients(module, nn.CrossEntropyLoss(), chunk=2))
    with meter(least=block // 20) as measured:
        for tape in mine.gradients.tapes((torch.randn(3, 2, 64), torch.tensor([0, 1, 1]))):
            for _ in mine.sums.local(tape.weighted_sums(inverse(tape.norms()))):
                pass
    return measured.peak / whole, block / whole


def test_nothing_of_the_models_size_is_ever_built(found: dict[str, list[Any]]) -> None:
    """Plan and checks included: one module runs, the next is gathered, one parameter's sum is exchanged."""
    for peak, block in found["peaks"]:
        assert block < peak < 4 * block < 0.6


# -- somebody else's loss --------------------------------------------------------------------------


def deferred(rank: int) -> list[tuple[float, float]]:
    """As in the drop-in: rank 0 has no row the second time."""
    own, found = case("transformer"), []
    gradients = DeferredGradients(sharded(own))
    whole = RecordGradients(built(own, torch.float64), nn.CrossEntropyLoss())
    mine = Sharded(gradients)
    for step, cut in enumerate((4, 0, 5)):
        torch.manual_seed(step)
        batch = own.rows(RECORDS, torch.float64)
        right, here = whole(batch, inverse), shares(cut)[rank]
        words, target = cut_out(batch, here)
        passed = gradients.run((words,), {})
        assert len(passed.outputs) == len(words)
        if len(words):
            functional.cross_entropy(passed.outputs, target, reduction="sum").backward()
        tape = gradients.tape(passed, 1.0)
        norms = tape.norms()
        sums = dict(mine.sums.local(tape.weighted_sums(inverse(norms))))
        found.append((relative(norms, right.norms[here]), mine.error(sums, right.sums)))
    return found


def test_deferred_gradients_of_a_sharded_model(found: dict[str, list[Any]]) -> None:
    for own in found["deferred"]:
        require_exact(dict(enumerate(own)), 1e-6)  # directions are float32 at least


# -- looks that data would decide ------------------------------------------------------------------


def looks(rank: int) -> dict[str, Any]:
    """Asked by all ranks together, rank 0 without a record; and how many passes each has run since."""
    own = case("mlp")
    module = sharded(own)
    passes = []
    module.register_forward_pre_hook(lambda *_: passes.append(1))
    gradients = RecordGradients(module, nn.CrossEntropyLoss(), fixed_shape=True, chunk=4)
    torch.manual_seed(0)
    batch = own.rows(6, torch.float64)
    mine = cut_out(batch, shares(0)[rank])
    shaped = gradients.batch_shaped(mine)
    same = [(mine, mine)] * 2 * rank
    other = [(mine, (mine[0] + 1, mine[1]))] * rank
    return {
        "shaped": shaped,
        "same": gradients.gradients_agree(same, like=mine),
        "other": gradients.gradients_agree(same + other, like=mine),
        "tapes": len(list(gradients.tapes(mine))),
        "passes": len(passes),
    }


def test_ranks_look_together_and_have_one_answer(found: dict[str, list[Any]]) -> None:
    first, second = found["looks"]
    assert first == second
    assert first["same"]
    assert not first["other"]  # on rank 1 alone


# -- replicas --------------------------------------------------------------------------------------


def replicated(rank: int) -> float:
    """Rank 0 alone runs the module inside of its wrapper: nothing waits for rank 1."""
    own = case("transformer")
    wrapped = nn.parallel.DistributedDataParallel(built(own, torch.float64))
    if rank:
        return 0.0
    torch.manual_seed(0)
    batch = own.rows(RECORDS, torch.float64)
    whole = RecordGradients(built(own, torch.float64), nn.CrossEntropyLoss())
    right = whole(batch, inverse)
    got = RecordGradients(wrapped.module, nn.CrossEntropyLoss())(batch, inverse)
    assert all(p.grad is None for p in wrapped.parameters())
    return max(float((got.sums[n] - right.sums[n]).abs().max()) for n in right.sums)


def test_the_wrapper_of_replicas_stays_quiet(found: dict[str, list[Any]]) -> None:
    assert max(found["replicated"]) < 1e-12
