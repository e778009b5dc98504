import pytest
import torch
from torch import nn

from dpis.errors import InputError
from dpis.models.kinds import KINDS, Inputs, model_kind

SHAPES = {
    "scatter-linear": (81, 7, 7),
    "scatter-cnn": (81, 7, 7),
    "cnn": (1, 28, 28),
    "cnn-relu": (1, 28, 28),
    "bag-linear": (20,),
    "bag-mlp": (20,),
    "mlp": (20,),
    "linear": (20,),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_model_gives_as_many_outputs_as_asked(name):
    model = model_kind(name).build(SHAPES[name], 7)
    assert model(torch.zeros(2, *SHAPES[name])).shape == (2, 7)


def test_every_model_is_tried_out():
    assert {name for name, kind in KINDS.items() if kind.inputs is not Inputs.WORDS} == set(SHAPES)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (3, 20, 24)), ("scatter-cnn", (162, 5, 6)), ("cnn", (3, 32, 32))]
)
def test_images_of_other_shapes_fit_too(name, shape):
    assert model_kind(name).build(shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)


def test_the_papers_networks_are_the_papers():
    assert (
        sum(p.numel() for p in model_kind("scatter-cnn").build((81, 7, 7), 10).parameters())
        == 33_066
    )
    assert sum(p.numel() for p in model_kind("cnn").build((1, 28, 28), 10).parameters()) == 26_010


def test_a_cnn_needs_images():
    with pytest.raises(InputError, match="needs images"):
        model_kind("cnn").build((20,), 2)


def make_without_arguments():
    return nn.Linear(3, 2)


def make_no_module(shape, outputs):
    return "a model"


def make_trouble(shape, outputs):
    raise RuntimeError("out of clay")


def test_what_a_factory_raises_is_told():
    with pytest.raises(
        InputError, match=r"make_trouble\(\[3\], 2\) made no model: RuntimeError: out of"
    ):
        model_kind(f"{__name__}:make_trouble").build((3,), 2)
    with pytest.raises(InputError, match=r"os:system\(.* made no model: TypeError"):
        model_kind("os:system").build((3,), 2)


@pytest.mark.parametrize(("source", "told"), [("def", "SyntaxError"), ("1 / 0", "ZeroDivision")])
def test_what_a_factorys_module_raises_is_told(tmp_path, monkeypatch, source, told):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"broken_{told}.py").write_text(source)
    with pytest.raises(InputError, match=f"importing 'broken_{told}' .* failed: {told}"):
        model_kind(f"broken_{told}:make")


def test_a_factory_by_its_import_path():
    assert isinstance(model_kind(f"{__name__}:make_without_arguments").build((3,), 2), nn.Linear)
    with pytest.raises(InputError, match=r"must return a torch\.nn\.Module"):
        model_kind(f"{__name__}:make_no_module").build((3,), 2)
    with pytest.raises(InputError, match="has no"):
        model_kind(f"{__name__}:absent")


def test_more_noise_a_smaller_learning_rate_up_to_the_largest():
    kind = model_kind("scatter-linear")
    rates = [kind.learning_rate(8192, noise) for noise in (0.0, 0.1, 5.0, 10.0)]
    assert rates[0] == rates[1] == kind.largest_learning_rate
    assert rates[2] == pytest.approx(2 * rates[3])


@pytest.mark.parametrize(
    ("name", "shape", "share"),
    [
        ("scatter-linear", (28, 28), 1),
        ("scatter-linear", (3, 56, 28), 6**-0.5),
        ("scatter-cnn", (3, 28, 28), 3**-0.5),
        ("scatter-linear", (8, 8), 1),
        ("cnn", (3, 32, 32), 1),
        ("linear", None, 1),
    ],
)
def test_larger_scattered_images_bear_less_noise(name, shape, share):
    kind = model_kind(name)
    usual = kind.learning_rate(500, 20)
    assert usual < kind.largest_learning_rate
    assert kind.learning_rate(500, 20, shape) == pytest.approx(share * usual)
