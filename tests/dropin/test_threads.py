"""Two private loops in two threads of one process: neither sees the other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.coupling import loss_watch
from dpis.generators import seeded_generators
from dpis.randomness import Key

from .loops import Loop, first_batch, private

WAIT = 20.0


def dropping() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()


def in_threads(*runs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def caught(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    if errors:
        raise errors[0]


def loop_of(seed: int) -> Loop:
    loop = private(dropping(), seed=seed, method="dp-sgd")
    loop.session.__class__ = type("Blind", (type(loop.session),), {"looks_now": False})
    return loop


def one_step(loop: Loop, within_backward: Callable[[], None] = lambda: None) -> Tensor:
    _, inputs, targets = first_batch(loop)
    outputs = loop.model(inputs)
    loss = functional.cross_entropy(outputs * 1.0, targets)

    def pause(gradient: Tensor) -> None:
        within_backward()

    outputs.register_hook(pause)
    loss.backward()
    loop.optimizer.step()
    return loop.weights


def test_a_backward_pass_in_the_middle_of_anothers() -> None:
    expected = [one_step(loop_of(1)), one_step(loop_of(2))]
    loops, found = [loop_of(1), loop_of(2)], {}
    begun, done = [threading.Event(), threading.Event()], threading.Event()

    def both_have_begun(own: int) -> None:
        begun[own].set()
        assert begun[1 - own].wait(WAIT)

    def first() -> None:
        try:
            found[0] = one_step(loops[0], lambda: both_have_begun(0))
        finally:
            done.set()

    def second() -> None:
        def until_the_other_is_done() -> None:
            both_have_begun(1)
            assert done.wait(WAIT)

        assert begun[0].wait(WAIT)  # the other backward pass began first, and ends first
        found[1] = one_step(loops[1], until_the_other_is_done)

    in_threads(first, second)
    for number in (0, 1):
        assert torch.equal(found[number], expected[number])
    assert not loss_watch._UNDER_WAY


def test_what_a_thread_fills_no_other_uses() -> None:
    """The states of generators are put back by who took them: two at once would leave a secret one behind."""
    before, inside, entered = torch.get_rng_state(), threading.Event(), threading.Event()
    key = Key.from_seed(0)

    def first() -> None:
        with seeded_generators(key.stream("one", 0)):
            inside.set()
            assert not entered.wait(0.2)

    def second() -> None:
        assert inside.wait(WAIT)
        with seeded_generators(key.stream("two", 0)):
            entered.set()

    in_threads(first, second)
    assert entered.is_set()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("arrives_in", ["its own thread", "a thread of the device"])
def test_a_gradient_belongs_to_the_backward_pass_of_its_loss(arrives_in: str) -> None:
    """On an accelerator gradients arrive in a thread that began none."""
    loop = private()
    _, inputs, targets = first_batch(loop)
    functional.cross_entropy(loop.model(inputs), targets)
    watch = loop.session._step.run[0].watch
    found = []
    with watch.differentiating():
        if arrives_in == "its own thread":
            found.append(watch._under_way())
        else:
            in_threads(lambda: found.append(watch._under_way()))
    assert found == [watch]
    assert watch._under_way() is None
