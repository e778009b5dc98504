"""Models sharded by ``fully_shard``: which parameter is which tensor while a pass runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpis import batches
from dpis.errors import GradientError, InputError
from dpis.gradients.rules.rule import HALF, Call
from dpis.gradients.sharded_sums import ShardedSums, require_rows
from dpis.gradients.sharding import Owners, Sharding
from dpis.gradients.watch import Computed, Shown, Use, Watch, made_of, names_in
from dpis.group import Group, current_group


class Location(NamedTuple):
    """Where a parameter is registered: tied ones are in several places."""

    layer: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is registered there now."""
        return self.layer._parameters.get(self.attribute)


class FullySharded(Sharding):
    """What FSDP2 made of a model.

    A sharded parameter is a `DTensor` of this rank's rows. While its module runs, FSDP2 registers a plain tensor of
    full size in its place, and frees it afterwards. The calls of the model see the latter.

    Args:
        module: the root, to which ``fully_shard`` was applied after its blocks.
    """

    is_sharded = True

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[Any] = [
            layer for layer in module.modules() if isinstance(layer, FSDPModule)
        ]
        if not isinstance(module, FSDPModule):
            raise InputError(_NO_ROOT)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trainable.items():
            require_rows(name, parameter)
        self.ranks = _group_of(trainable)
        self.sums = ShardedSums.of(self.ranks, trainable)
        self._locations = _by_owner(module, self.modules)
        self._owner_of = {
            location.name: index
            for index, locations in enumerate(self._locations)
            for location in locations
        }
        self._left = set[Hashable]()
        self._full: dict[str, Tensor] = {}
        self._name_of: dict[int, str] = {}

    @property
    def half(self) -> bool:
        """Whether FSDP2's policy casts trainable parameters so."""
        return any(full.dtype in HALF for full in self._full.values() if full.requires_grad)

    @contextmanager
    def shown_to(self, watch: Watch) -> Iterator[None]:
        """Hooks that run right before and right after FSDP2's own."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(watch.follows(tensor) for tensor in batches.tensors((args, kwargs))):
                raise GradientError(_PASSED_ON.format(type(module).__name__.removeprefix("FSDP")))

        def gathered(module: nn.Module, args: Any = None) -> None:
            for name, tensor in self._look(self.modules.index(module)):
                watch.know(name, tensor)

        def left(module: nn.Module, args: Any, outputs: Any) -> None:
            followed = (t for t in batches.tensors(outputs) if watch.follows(t))
            self._left.update(watch.source_of(tensor).label for tensor in followed)

        with ExitStack() as stack:
            for module in self.modules:
                module.reshard()  # what another pass left gathered may be older than the last update
                handles = (
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                    module.register_forward_pre_hook(gathered),
                    module.register_forward_hook(left),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def _look(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """The plain tensors that are registered in one sharded module now, if they require gradients."""
        for location in self._locations[index]:
            tensor = location.tensor
            if tensor is not None and not isinstance(tensor, DTensor):
                if tensor is not (before := self._full.get(location.name)):
                    self._name_of.pop(id(before), None)
                    self._full[location.name] = tensor
                    self._name_of[id(tensor)] = location.name
                if tensor.requires_grad:
                    yield location.name, tensor

    def is_still(self, name: str, before: Tensor, now: Tensor) -> bool:
        """Sharded or gathered. What was gathered outside of our passes is freed to see: that takes no communication."""
        if now is before or now is self._full.get(name):
            return True
        owner = self._owner_of[name]
        self.modules[owner].reshard()
        return any(at.name == name and at.tensor is before for at in self._locations[owner])

    def needed_by(self, use: Use, watch: Watch) -> Owners:
        """Those of a call whose rule reads parameters, of frozen arguments, and of what was computed."""
        names = set[str]()
        for source in use.parameters:
            pulled = isinstance(source, Computed) and source.by_autograd
            if pulled and not self._left.isdisjoint(made_of(source.label)):
                raise GradientError(_RETURNED.format(names_in(source.label)[0]))
            if use.rule.reads_parameters or not isinstance(source, Shown):
                names.update(names_in(source.label))
        if isinstance(use.saved, Call):
            frozen = (self._name_of.get(id(tensor)) for tensor in use.saved.inputs())
            names.update(name for name in frozen if name is not None)
        return tuple(sorted({self._owner_of[name] for name in names}))

    @contextmanager
    def gathered(self, owners: Owners) -> Iterator[None]:
        """By FSDP2's own gathering, and freed again."""
        if owners:
            with self.ranks.in_a_pass():
                for index in owners:
                    self.modules[index].unshard()
        try:
            yield
        finally:
            for index in owners:
                self.modules[index].reshard()


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module or to any in it, or a parameter is a slice."""
    slices = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    return slices or any(isinstance(layer, FSDPModule) for layer in module.modules())


def _group_of(parameters: Mapping[str, Tensor]) -> Group:
    """The processes over which all of them are sharded: all there are."""
    meshes = {p.device_mesh: name for name, p in parameters.items() if isinstance(p, DTensor)}
    if len(meshes) > 1:
        raise InputError(_MESHES.format(*list(meshes.values())[:2]))
    group = current_group()
    if any(mesh.mesh.flatten().tolist() != list(range(group.size)) for mesh in meshes):
        raise InputError(_NOT_ALL)
    return group


def _by_owner(root: nn.Module, sharded: Sequence[nn.Module]) -> list[list[Location]]:
    """Where the parameters of each sharded module are registered: in it, but in no sharded module inside it."""
    index_of = {module: index for index, module in enumerate(sharded)}
    name_of = {parameter: name for name, parameter in root.named_parameters()}
    found: list[list[Location]] = [[] for _ in sharded]

    def visit(layer: nn.Module, owner: int) -> None:
        owner = index_of.get(layer, owner)
        for attribute, parameter in layer._parameters.items():
            if parameter is not None:
                found[owner].append(Location(layer, attribute, name_of[parameter]))
        for child in layer.children():
            visit(child, owner)

    visit(root, index_of[root])
    return found


_NO_ROOT = (
    "The model itself must be sharded, not only some of its blocks: call fully_shard(block) for the blocks and then "
    "fully_shard(model). Else its other parameters would go their own way on every rank."
)
_MESHES = (
    "All trainable parameters must be sharded over one mesh of devices, but those of {} and {} are not. Their sums "
    "would be added up over different ranks, and the noise would be wrong. Give fully_shard the same mesh everywhere."
)
_NOT_ALL = (
    "A sharded model must be sharded over all processes there are, in the order of their ranks: the records of others "
    "would take part in no sum, or rows get the sums of other rows. Make the mesh of all ranks, in their order."
)
_PASSED_ON = (
    "A tensor that is computed from parameters alone must not be passed into a sharded module, but one was passed into "
    "{}: FSDP replaces it there, and the gradients that arrive at it could not be followed, so nothing could be "
    "clipped. Compute it inside of that module, or shard both together: leave out fully_shard for the inner one."
)
_RETURNED = (
    "What a sharded module returns must depend on the records, or be looked up in a table, but the gradient of {} "
    "passes through what was computed from parameters alone in a module sharded by itself: FSDP would gather that "
    "module once more in the midst, on some ranks only. Leave out fully_shard for that module: its parent shards it."
)
