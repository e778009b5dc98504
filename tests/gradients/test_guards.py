"""What couples records is refused, with the layer's name; fix replaces what it can."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from dpis.errors import CouplingError, GradientError, InputError
from dpis.gradients import RecordGradients, SlowGradientsWarning
from dpis.gradients.call_plan import MOST_ROUNDS
from dpis.gradients.rules.linear import Linear
from tests.coupling.test_forbidden_layers import image_model
from tests.gradients.problems import function, mlp, square


class TestRefused:
    def test_batch_norm_in_training_is_named(self) -> None:
        with pytest.raises(CouplingError, match=r"'0\.1' \(BatchNorm2d\).*privacy.*dpis\.fix"):
            RecordGradients(image_model(), nn.CrossEntropyLoss())

    def test_running_statistics_are_named(self) -> None:
        model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True))
        with pytest.raises(CouplingError, match=r"'0' \(InstanceNorm1d\) keeps running"):
            RecordGradients(model, nn.MSELoss())

    def test_batch_norm_as_a_function(self) -> None:
        make = function(
            lambda m, x: nn.functional.batch_norm(x, None, None, m.scale, training=True), scale=(6,)
        )
        with pytest.raises(CouplingError, match="Batch normalisation in training mode"):
            RecordGradients(make(), objective=square).record((torch.randn(4, 6),))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
    def test_torchscript(self) -> None:
        script = torch.jit.trace(mlp(), torch.randn(2, 6))
        with pytest.raises(InputError, match="TorchScript"):
            RecordGradients(nn.Sequential(script), nn.CrossEntropyLoss())

    @pytest.mark.parametrize(
        "mix",
        [
            lambda h: h - h.mean(0),
            lambda h: h / h.norm(),
            lambda h: h.softmax(0),
            lambda h: h + 0.1 * h.flip(0),
            lambda h: h[h.sum(1).argsort()],
        ],
        ids=["centred", "normalised", "softmax", "neighbour", "sorted"],
    )
    def test_custom_coupling(self, mix) -> None:
        torch.manual_seed(0)
        make = function(
            lambda m, x: m.after(mix(m.before(x))),
            before=lambda: nn.Linear(6, 4),
            after=lambda: nn.Linear(4, 2),
        )
        with pytest.raises(CouplingError, match="privacy"):
            RecordGradients(make(), objective=square).record((torch.randn(4, 6),))

    @pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
    def test_embeddings_that_look_at_the_batch(self, option: dict) -> None:
        model = nn.Embedding(7, 4, **option)
        with pytest.raises(CouplingError, match=next(iter(option))):
            RecordGradients(model, objective=square).record((torch.randint(0, 7, (4, 3)),))

    def test_a_parameter_without_a_gradient_is_named(self) -> None:
        make = function(lambda m, x: m.used(x), used=lambda: nn.Linear(6, 4), forgotten=(3,))
        with pytest.raises(InputError, match=r"forgotten.*requires_grad_"):
            RecordGradients(make(), objective=square).record((torch.randn(4, 6),))

    def test_a_loss_cut_off_from_the_model(self) -> None:
        with pytest.raises(InputError, match=r"0\.weight, 0\.bias"):
            RecordGradients(mlp(), objective=lambda m, b: square(m, b).detach()).record(
                (torch.randn(4, 6),)
            )

    def test_a_parameter_behind_too_long_a_chain(self) -> None:
        def chained(m: nn.Module, x: Tensor) -> Tensor:
            scale = m.scale
            for _ in range(MOST_ROUNDS + 1):
                scale = torch.tanh(scale)
            return x * scale

        gradients = RecordGradients(function(chained, scale=(6,))(), objective=square)
        with pytest.raises(GradientError, match=r"at most 50 calls.*no privacy"):
            gradients.record((torch.randn(4, 6),))

    def test_a_loss_that_is_no_tensor(self) -> None:
        gradients = RecordGradients(nn.Linear(6, 2), objective=lambda module, batch: 0.5)
        with pytest.raises(InputError, match=r"as a tensor; found a value of type float"):
            gradients.record((torch.randn(4, 6),))

    def test_an_input_changed_in_place(self) -> None:
        def changed(m: nn.Module, x: Tensor) -> Tensor:
            hidden = m.first(x).tanh()
            output = m.second(hidden)
            hidden.detach().mul_(2)
            return output

        make = function(changed, first=lambda: nn.Linear(6, 4), second=lambda: nn.Linear(4, 2))
        with pytest.raises(GradientError, match=r"second.*changed in place"):
            RecordGradients(make(), objective=square).record((torch.randn(4, 6),))

    def test_a_first_layer_input_changed_in_place(self) -> None:
        def changed(m: nn.Module, x: Tensor) -> Tensor:
            x = x.clone()
            output = m.layer(x)
            x.mul_(2)
            return output

        make = function(changed, layer=lambda: nn.Linear(6, 4))
        with pytest.raises(GradientError, match=r"layer\.weight was changed in place"):
            RecordGradients(make(), objective=square).record((torch.randn(4, 6),))


class TestFallback:
    def test_it_is_said_once(self) -> None:
        make = function(lambda m, x: torch.einsum("bi,oi->bo", x, m.weight), weight=(4, 6))
        gradients = RecordGradients(make(), objective=square)
        with pytest.warns(SlowGradientsWarning, match=r"weight \(einsum") as said:
            gradients.record((torch.randn(4, 6),))
        assert len(said) == 1
        gradients.record((torch.randn(4, 6),))  # warnings are errors: silent now

    def test_control_flow_by_value(self) -> None:
        def twofold(m: nn.Module, x: Tensor) -> Tensor:
            rows = [m.scale.cumsum(0) * row if row.sum() > 0 else row - m.scale for row in x]
            return torch.stack(rows)

        torch.manual_seed(0)
        model = function(twofold, scale=(6,))().double()
        x = torch.randn(6, 6, dtype=torch.float64)
        with pytest.warns(SlowGradientsWarning):
            tape = RecordGradients(model, objective=square).record((x,))
        for record in range(6):
            loss = square(model, (x[record : record + 1],)).sum()
            (expected,) = torch.autograd.grad(loss, list(model.parameters()))
            torch.testing.assert_close(tape.norms()[record], expected.norm())


class TestSelfCheck:
    """A rule that is wrong is found out at the first batch."""

    def test_a_wrong_rule_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right, places = Linear.factors, torch.tensor([1, 2, 0])

        def wrong(self: Linear, saved, watched):
            for parameter, factor in right(self, saved, watched):
                last_layer = factor.shape[0] == 4
                yield parameter, factor.select(places) if last_layer else factor

        torch.manual_seed(0)
        module, x = mlp().double(), torch.randn(3, 6).double()
        expected = RecordGradients(module, objective=square).record((x,)).norms()
        monkeypatch.setattr(Linear, "factors", wrong)
        with pytest.warns(SlowGradientsWarning, match=r"2\.weight \(the fast gradient differed"):
            found = RecordGradients(module, objective=square).record((x,)).norms()
        torch.testing.assert_close(found, expected)
        unchecked = RecordGradients(module, objective=square, check=False).record((x,)).norms()
        assert not torch.allclose(unchecked, expected)


def test_a_stack_of_weights_takes_the_general_way() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Parameter(torch.randn(3, 6, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, None, None] @ self.heads).flatten(1)

    module, x = Heads(), torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norms = RecordGradients(module, objective=square).record((x,)).norms()
    for record in range(4):
        loss = square(module, (x[record : record + 1],)).sum()
        (gradient,) = torch.autograd.grad(loss, [module.heads])
        torch.testing.assert_close(norms[record], gradient.norm().double(), rtol=1e-5, atol=0.0)
