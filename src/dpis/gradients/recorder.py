"""Records one chunk: plans at the first, checks against plain autograd, then runs the plan."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpis import batches
from dpis.batches import Batch
from dpis.coupling.agreement import PlainGradients, norms_fit, same_gradient, without_dropout
from dpis.coupling.forbidden_layers import checked_model
from dpis.coupling.looks import Looks
from dpis.coupling.model_parts import parts_of
from dpis.coupling.neighbours import half_of
from dpis.errors import GradientError, InputError
from dpis.gradients.backward import is_placed, left_to_fallback, run_backward
from dpis.gradients.call_plan import (
    GeneralRuleError,
    general,
    layouts_of,
    make_plan,
    merge,
    unplanned,
)
from dpis.gradients.evidence import refuse_gradients_of
from dpis.gradients.factors import Dense
from dpis.gradients.fallback import SlowGradients, SlowGradientsWarning
from dpis.gradients.layerwise import Comparison, backward_meeting, compare, same_sums
from dpis.gradients.losses import Objective, weighted_total
from dpis.gradients.parts import Part, Place, without_overlap
from dpis.gradients.sharding import Owners, sharding_of
from dpis.gradients.tape import Tape, full_precision
from dpis.gradients.verdicts import Beyond, Plan
from dpis.gradients.watch import Watch, shown
from dpis.group import warn

T = TypeVar("T")

# To plan again once, then to leave surprising calls to the fallback, link by link.
MOST_ATTEMPTS = 20


# How many records are compared with plain autograd at the first pass, and at the 2nd, 4th, 8th, ...
COMPARED_FIRST, COMPARED_LATER = 4, 2


@dataclass(frozen=True, eq=False)
class WatchedPass(Generic[T]):
    """A forward pass without its losses.

    Attributes:
        outputs: what the model returned.
        watch: what it did, all of it in the plan.
        records: how many went in.
        real: how many of them count: the rest fills up.
    """

    outputs: T
    watch: Watch
    records: int
    real: int


class Recorder:
    """One forward and one backward pass at a time, over batches that fit one chunk.

    It learns two things at its first batch and then only looks them up: the plan (what to do with
    each call) and which parameters take the slow way.

    Args:
        module: the model, as `checked_model` returned it.
        objective: the loss of every row, or of the batch.
        rows_per_record: how many consecutive rows are one record.
        check: whether to compare with plain autograd at the first batch.
    """

    def __init__(
        self, module: nn.Module, objective: Objective, rows_per_record: int, check: bool
    ) -> None:
        self.module, self.objective = module, objective
        self.rows_per_record = rows_per_record
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.sharding = sharding_of(module)
        self._shown = {} if self.sharding.is_sharded else shown(self.parameters)
        self._turns: list[Owners] = []
        self.bytes_per_record, self.batch_shaped = 0, False
        self.parameter_bytes = sum(p.nbytes for p in module.parameters())
        self._recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
        self._check, self._ready, self._planned = check, False, False
        self._plan: Plan = {}
        self._ran_again = False
        self._slow: dict[str, str] = {}
        self._looks = Looks()
        self._said, self._said_names = 0, set[str]()

    def record(self, batch: Batch, present: Tensor | None = None, real: int | None = None) -> Tape:
        """The gradients of every record of a batch, as factors.

        Args:
            batch: the records.
            present: which rows count; None: all.
            real: only the first so many are records, the rest fills up; None: all.
        """
        with self.sharding.ranks.stopping():
            self._look_around(batch, real)
            tape = self._record(batch, present, real)
            self._say_what_is_slow()
            self.sharding.ranks.any(False)  # nobody goes on where another stops
        return tape

    def forward(
        self, batch: Batch, run: Callable[[], T], real: int | None = None
    ) -> WatchedPass[T]:
        """A forward pass alone, for whoever learns the losses later.

        Args:
            batch: the records, in the form that the objective takes.
            run: runs the model on them.
            real: as in `record`.
        """
        with self.sharding.ranks.stopping():
            self._look_around(batch, real)
            records = batches.records(batch, self.rows_per_record)
            outputs, watch = self._run_planned(batch, run, real)
        return WatchedPass(outputs, watch, records, records if real is None else real)

    def tape(self, forward: WatchedPass[Any], total: Tensor, same: Batch) -> Tape:
        """The gradients of every record, once the total of their losses is known.

        Args:
            forward: as `forward` returned it. Its graph is used up.
            total: the sum of the losses of all records.
            same: a batch for which the objective gives these losses, where the pass must be run again.
        """
        with self.sharding.ranks.stopping():
            try:
                tape = self._tape(forward.watch, total, same, forward.records, None, forward.real)
            except GeneralRuleError as error:
                self._leave_to_fallback(error)
                tape = self._record(same)
            self._say_what_is_slow()
            self.sharding.ranks.any(False)
        return tape

    def _look_around(self, batch: Batch, real: int | None) -> None:
        """Plan at the first batch; compare with plain autograd now and then."""
        self._require_unchanged()
        self.prepare(batch, real)
        if self._looks.due() and self._check:  # the first batch may not show all
            with self.undisturbed():
                self._probe_ownership(batch, real)
                if self.sharding.is_sharded:
                    self._compare_layer_by_layer(self._several(batch, real), blank=real == 0)
                else:
                    self._compare_with_autograd(self._several(batch, real))

    def prepare(self, batch: Batch, real: int | None = None) -> None:
        """Plan, once, on three records of the batch; on what fills up only while a rank has no record."""
        blank = real == 0
        ready = self._ready or (blank and self._planned)
        if not self.sharding.ranks.any(not ready):
            return
        few = self._few(batch)
        with self.sharding.ranks.stopping(), self.undisturbed():
            self._plan_on(few, blank)
            self._require_gradients(few, blank)
        self._planned, self._ready = True, self._ready or not blank

    @property
    def ready(self) -> bool:
        """Whether records of this rank were looked at."""
        return self._ready

    def depends_on_place(self, batch: Batch, real: int | None = None) -> bool:
        """Whether the last bits of norms change when the records of a batch change their places."""
        records = batches.records(batch, self.rows_per_record)

        def norms(shift: int) -> Tensor:
            places = torch.arange(records, device=batches.device(batch)).roll(shift)
            rolled = batches.take(batch, batches.rows_of_records(places, self.rows_per_record))
            return self._record(rolled, real=real).norms().roll(-shift)

        self.prepare(batch, real)
        with self.undisturbed(), without_dropout(self.module):
            in_order = norms(0)
            moved = [norms(shift) for shift in (1, records // 2 + 1, records - 3)]
            here = any(not torch.equal(m.nan_to_num(), in_order.nan_to_num()) for m in moved)
        return self.sharding.ranks.any(here)

    def gradients_agree(self, one: Batch, other: Batch) -> bool:
        """Whether the losses of two batches have the same gradient, to the tolerance of other comparisons.

        A model that is random even without dropout has no gradient to compare: then they are said to agree.
        """
        if self.sharding.is_sharded:
            return self._fast_gradients_agree(one, other)

        def gradient(batch: Batch) -> Tensor:
            losses = self.objective(self.module, batch).sum()
            found = torch.autograd.grad(losses, list(self.parameters.values()), allow_unused=True)
            return torch.cat([g.double().flatten() for g in found if g is not None])

        with self.undisturbed(), without_dropout(self.module), torch.enable_grad(), _eagerly():
            first, again, half = gradient(one), gradient(one), self._half(one)
            return not same_gradient(first, again, half) or same_gradient(
                first, gradient(other), half
            )

    def _fast_gradients_agree(self, one: Batch, other: Batch) -> bool:
        """The same for a sharded model, parameter by parameter. All ranks ask, and have one answer."""
        with self.sharding.ranks.stopping(), self.undisturbed(), without_dropout(self.module):
            first, again, changed = (self._record(batch) for batch in (one, one, other))
            half = self._half(one)
            here = same_sums(first, changed, half) or not same_sums(first, again, half)
            return not self.sharding.ranks.any(not here)

    def _half(self, batch: Batch) -> bool:
        return torch.is_autocast_enabled(batches.device(batch).type) or self.sharding.half

    def _require_unchanged(self) -> None:
        """What was true of the module at the start must still be: parameters, and nothing that couples records."""
        checked_model(self.module)
        parameters = parts_of(self.module).parameters.items()
        now = {name: p for name, p in parameters if p.requires_grad}
        same = now.keys() == self.parameters.keys()
        is_still = self.sharding.is_still
        if not same or not all(is_still(n, p, now[n]) for n, p in self.parameters.items()):
            raise GradientError(
                "The module's trainable parameters must stay those it had when RecordGradients was made; some were "
                "replaced, added, frozen or thawed since. Their gradients would be neither clipped nor summed. Make a "
                "new RecordGradients after such a change."
            )

    # -- one pass --------------------------------------------------------------------------------

    def _record(self, batch: Batch, present: Tensor | None = None, real: int | None = None) -> Tape:
        while True:
            try:
                return self._try_to_record(batch, present, real)
            except GeneralRuleError as error:
                self._leave_to_fallback(error)

    def _leave_to_fallback(self, error: GeneralRuleError) -> None:
        reason = "torch.func cannot treat it by itself"
        if self.sharding.is_sharded:
            raise GradientError(_NO_FALLBACK.format(error.names, reason)) from error
        self._plan[error.key] = Beyond(reason)

    def _try_to_record(self, batch: Batch, present: Tensor | None, real: int | None) -> Tape:
        records = batches.records(batch, self.rows_per_record)
        losses, watch = self._run_planned(batch, real=real)
        total = weighted_total(losses, records, self.rows_per_record, present, real)
        return self._tape(watch, total, batch, records, present, real)

    def _tape(
        self,
        watch: Watch,
        total: Tensor,
        batch: Batch,
        records: int,
        present: Tensor | None,
        real: int | None,
    ) -> Tape:
        """Backward to the watched tensors; what no rule covers, by ``torch.func`` over the batch."""
        rows = records * self.rows_per_record
        own = records if real is None else real
        with full_precision(total.device):
            parts = run_backward(
                watch, self._plan, total, records, rows, own, self.sharding, self._turns
            )
        slow = left_to_fallback(watch, self._plan) | self._slow if own else {}
        if slow:
            parts |= self._slowly(slow, batch, records, present)
        parameters = {name: self._full(name, watch) for name in self.parameters}
        with torch.no_grad(), full_precision(total.device):
            combined = {n: without_overlap(parts.get(n, ()), p) for n, p in parameters.items()}
        return Tape(parameters, combined, own, filling=records - own)

    def _full(self, name: str, watch: Watch) -> Tensor:
        """The tensor of full size that the model used for a parameter."""
        used = watch.parameters.get(name)
        if used is None:
            raise GradientError(_NOT_GATHERED.format(name))
        return used.parameter

    def _run_planned(
        self, batch: Batch, run: Callable[[], Any] | None = None, real: int | None = None
    ) -> tuple[Any, Watch]:
        """What a run over a batch returns, and what it did, all of it in the plan.

        Args:
            batch: the records.
            run: runs the model on them; None: the objective, for the losses of all rows.
            real: as in `record`. What fills up alone surprises nobody.
        """
        ranks = self.sharding.ranks
        rows = batches.records(batch, self.rows_per_record) * self.rows_per_record
        run = run or (lambda: self.objective(self.module, batch))
        for attempt in range(MOST_ATTEMPTS):
            watch = self._new_watch(self._plan)
            result = self._watched(watch, run)
            surprises = [] if real == 0 else unplanned(watch, self._plan, rows)
            new = {self.sharding.needed_by(use, watch) for use in watch.uses} - {(), *self._turns}
            if not ranks.any(bool(surprises or new)):
                return result, watch
            if not ranks.any(bool(surprises)):
                self._take_turns(new)
                return result, watch
            if attempt == 0:
                with self.undisturbed():
                    self._plan_on(self._few(batch), blank=real == 0)
            else:
                self._plan |= dict.fromkeys(surprises, Beyond("it is called for some records only"))
        raise GradientError(
            "The model must make the same calls whenever it is given the same batch, and does not, so "
            "the places of the records in its tensors cannot be known: nothing could be clipped and no "
            "privacy promised. Let its control flow depend on nothing random."
        )

    def _take_turns(self, new: set[Owners]) -> None:
        """Agree on further sharded modules to be gathered after backward, and on the order."""
        known = set(self._turns).union(*self.sharding.ranks.gathered(new))
        self._turns = sorted(known)

    def _losses(self, watch: Watch, batch: Batch) -> Tensor:
        return self._watched(watch, lambda: self.objective(self.module, batch))

    def _watched(self, watch: Watch, run: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_eagerly())
            stack.enter_context(_packed_order(self._recurrent, watch))
            stack.enter_context(self.sharding.shown_to(watch))
            stack.enter_context(self.sharding.ranks.in_a_pass())
            stack.enter_context(watch)
            return run()

    def _new_watch(self, plan: Plan, planning: bool = False) -> Watch:
        may_run_again = planning or self._ran_again
        return Watch(self._shown, plan, keep_watched=planning, may_run_again=may_run_again)

    def _slowly(
        self, slow: dict[str, str], batch: Batch, records: int, present: Tensor | None
    ) -> dict[str, list[Part]]:
        """The parameters that no rule covers, by ``torch.func`` over the whole model."""
        if self.sharding.is_sharded:
            name, reason = next(iter(slow.items()))
            raise GradientError(_NO_FALLBACK.format(name, reason))
        self._slow |= slow
        wanted = {name: self.parameters[name] for name in slow}
        slowly = SlowGradients(self.module, self._loss_of_record, wanted)
        explicit = slowly.of(batch, records, present)
        return {
            name: [Part(Place.of(wanted[name], wanted[name]), Dense(gradients))]
            for name, gradients in explicit.items()
        }

    def _loss_of_record(self, module: nn.Module, rows: Batch, present: Tensor | None) -> Tensor:
        losses = self.objective(module, rows)
        return weighted_total(losses, 1, self.rows_per_record, present)

    # -- the first batch -------------------------------------------------------------------------

    def _plan_on(self, few: Batch, blank: bool) -> None:
        """Learn what the plan does not know; what only fills up never unsays what records showed."""
        found = self._make_plan(few)
        self._plan = merge(found, self._plan) if blank else merge(self._plan, found)

    def _make_plan(self, few: Batch) -> Plan:
        def new_watch(plan: Plan) -> Watch:
            return self._new_watch(plan, planning=True)

        found = make_plan(self._losses, new_watch, few, self.rows_per_record, self.sharding)
        self.bytes_per_record = max(self.bytes_per_record, found.bytes_per_record)
        self.batch_shaped |= found.batch_shaped
        self._ran_again |= found.ran_again
        return found.plan

    def _say_what_is_slow(self) -> None:
        """Once for each parameter, when it is found out."""
        if len(self._plan) + len(self._slow) == self._said:
            return
        slow = general(self._plan) | self._slow
        self._said = len(self._plan) + len(self._slow)
        if slow.keys() - self._said_names:
            self._said_names |= slow.keys()
            named = ", ".join(f"{name} ({reason})" for name, reason in slow.items())
            warn(
                f"Gradients of single records are computed by torch.func for {named}. They are "
                "right, but slower and larger than those of the layers that dpis knows.",
                SlowGradientsWarning,
                stacklevel=4,
            )

    def _require_gradients(self, few: Batch, blank: bool) -> None:
        """A parameter that no call was seen to use may be used unseen: then it takes the slow way."""
        tape = self._record(few, real=0 if blank else None)
        unseen = [name for name, parts in tape.parts.items() if not parts]
        if blank or not unseen:
            return
        if self.sharding.is_sharded:
            raise GradientError(
                _NO_FALLBACK.format(", ".join(unseen), "no call was seen to use it")
            )
        sums = self._plainly(few).sums
        missing = [name for name in unseen if not sums[name].any()]
        if missing:
            raise InputError(
                f"Every trainable parameter needs a gradient; found none for {', '.join(missing)}. "
                "The optimizer would move them by noise alone, or not at all. Freeze what the loss "
                "does not depend on: parameter.requires_grad_(False)."
            )
        self._slow |= dict.fromkeys(unseen, "it is used where that cannot be seen")

    def _probe_ownership(self, batch: Batch, real: int | None) -> None:
        """Half of the records are asked for the gradients of their losses: the others have none in their places."""
        records = batches.records(batch, self.rows_per_record)
        losses, watch = self._run_planned(batch, real=real)
        asked = half_of(records).to(losses.device)
        total = losses[asked.repeat_interleave(self.rows_per_record)].sum()
        uses = [u for u in watch.uses if self.sharding.is_sharded or is_placed(u, self._plan)]
        with self.sharding.ranks.in_a_pass():
            found = watch.backward(total, uses)
        for use, gradients in zip(uses, found, strict=True):
            layouts = layouts_of(use, self._plan, len(losses)) or ()
            refuse_gradients_of(~asked, records, use, gradients, layouts)

    def _compare_layer_by_layer(self, few: Batch, blank: bool) -> None:
        """The same for a sharded model, of which no rank holds a whole gradient: equally many passes on all ranks."""
        ranks, records = self.sharding.ranks, batches.records(few, self.rows_per_record)
        with without_dropout(self.module):
            tape = self._record(few, real=0 if blank else None)
            found = [self._compared(tape, few, record) for record in range(records)]
            dtype = torch.bfloat16 if self._half(few) else torch.float32
            off = {name for one in found if one is not None for name in one.off(dtype)}
            if not ranks.any(bool(off)):
                return
            again = [self._compared(tape, few, record) for record in range(records)]
        is_random = [one and one.plain for one in found] != [one and one.plain for one in again]
        if off and not is_random:
            raise GradientError(_DIFFERENT.format(", ".join(sorted(off))))

    def _compared(self, tape: Tape, few: Batch, record: int) -> Comparison | None:
        """One record of a tape against plain autograd; None: it only fills up."""
        place = torch.tensor([record], device=batches.device(few))
        own = batches.take(few, batches.rows_of_records(place, self.rows_per_record))
        with self.sharding.ranks.in_a_pass(), torch.enable_grad(), _eagerly():
            loss = self._loss_of_record(self.module, own, None)
            if tape.records:
                return compare(tape, record, loss)
            backward_meeting(loss, tape.parameters, lambda *_: None)
            return None

    def _compare_with_autograd(self, few: Batch) -> None:
        with without_dropout(self.module):
            plain, half = self._plainly(few), self._half(few)
            off = plain.disagreements(self._record(few), half)
            if off and norms_fit(self._record(few), half) and self._agrees_in_float64(few):
                return  # rounding: two positions share a maximum, a softmax has come to 1
            if off:
                if not self._plainly(few).equals(plain):
                    return  # the model is random even without dropout: nothing to compare with
                self._slow |= dict.fromkeys(off, "the fast gradient differed from autograd's")
                off = plain.disagreements(self._record(few), half)
        if off:
            raise GradientError(
                "Gradients of single records were required to equal those of plain autograd on one "
                f"record at a time; those of {', '.join(off)} do not, even by torch.func. Records "
                "may couple, or the model may depend on the batch size. Nothing can be clipped "
                "safely like this, so no privacy could be promised."
            )

    def _agrees_in_float64(self, few: Batch) -> bool:
        """Whether fast gradients are autograd's where rounding plays no part; False, if the model cannot be run so."""
        try:
            module = copy.deepcopy(self.module).double()
            exact = Recorder(module, self.objective, self.rows_per_record, check=False)
            exactly = batches.apply(lambda t: t.double() if t.is_floating_point() else t, few)
            with without_dropout(module):
                exact.prepare(exactly)
                plain = exact._plainly(exactly)
                return not plain.disagreements(exact._record(exactly), half=False)
        except Exception:
            return False  # losses and layers may hold numbers of one type

    def _plainly(self, few: Batch) -> PlainGradients:
        slowly = SlowGradients(self.module, self._loss_of_record, self.parameters)
        each = slowly.each(few, batches.records(few, self.rows_per_record))
        return PlainGradients.of(each)

    def _few(self, batch: Batch) -> Batch:
        """Three records; fewer are repeated."""
        records = batches.records(batch, self.rows_per_record)
        index = torch.arange(3, device=batches.device(batch)) % records
        return batches.take(batch, batches.rows_of_records(index, self.rows_per_record))

    def _several(self, batch: Batch, real: int | None) -> Batch:
        """Some records from all over the batch, in its order: a model may want the longest first."""
        records = real or batches.records(batch, self.rows_per_record)
        most = COMPARED_FIRST if self._looks.occasions == 1 else COMPARED_LATER
        drawn = torch.randperm(records)[:most]
        if self.sharding.is_sharded:  # equally many on all ranks
            drawn = drawn[torch.arange(most) % len(drawn)]
        index = drawn.sort().values.to(batches.device(batch))
        return batches.take(batch, batches.rows_of_records(index, self.rows_per_record))

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Looking around leaves no trace: neither in the random stream nor in the buffers."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with torch.random.fork_rng():
            try:
                yield
            finally:
                for buffer, before in buffers:
                    buffer.data.copy_(before)


def _eagerly() -> AbstractContextManager[object]:
    """Compiled parts of the model run as they were written: their graphs cannot be watched."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing was compiled, and the import would take seconds
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _packed_order(layers: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Tell the watch in which order records stand in packed sequences, while a layer reads one."""

    def before(_: nn.Module, inputs: tuple[object, ...]) -> None:
        packed = inputs[0] if inputs and isinstance(inputs[0], PackedSequence) else None
        watch.record_order = None if packed is None else packed.sorted_indices

    def after(*_: object) -> None:
        watch.record_order = None

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_NO_FALLBACK = (
    "Every parameter of a sharded model must be used in calls that dpis can take apart, one by one; {}: {}. Without "
    "its gradients nothing could be clipped. The slow way over the whole model needs all of its parameters in one "
    "place: freeze the parameter, write the layer with functions of torch.nn.functional, or train without fully_shard."
)
_DIFFERENT = (
    "Gradients of single records were required to equal those of plain autograd on one record at a time; those of {} "
    "do not. Records may couple, or the model may depend on the batch size: nothing can be clipped safely like this, "
    "so no privacy could be promised. Train a small copy of the model without fully_shard: it tells rounding from "
    "mistakes, and can take the slow way."
)
_NOT_GATHERED = (
    "Every trainable parameter of a sharded model must be used in every pass; {} was not even gathered. The optimizer "
    "would move it by noise alone. Freeze what the loss does not depend on: parameter.requires_grad_(False)."
)
