"""Models of transformers and adapters of peft, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpis.gradients import RecordGradients
from dpis.gradients.factors import Sum
from tests.gradients import oracles
from tests.gradients.problems import Problem

pytestmark = pytest.mark.slow  # for the time that their imports take

RECORDS, LENGTH, WORDS = 4, 9, 50


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (RECORDS, LENGTH))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(RECORDS, LENGTH, dtype=torch.long)
    mask[1, 6:] = mask[2, 3:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": torch.arange(RECORDS) % 2}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(
        logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none"
    ).mean(1)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=2,
    )
    return transformers.ViTForImageClassification(config)


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide mistakes
            nn.init.normal_(parameter, std=0.3)
    return model


def words_only() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def images() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(RECORDS, 3, 8, 8, dtype=torch.float64),
        "labels": torch.arange(RECORDS) % 2,
    }


MODELS = {
    "bert": (bert, padded, classify),
    "gpt2-tied-head": (gpt2, words_only, next_word),
    "llama": (llama, words_only, next_word),
    "vit": (vit, images, classify),
    "lora-gpt2": (
        lambda: adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
        words_only,
        next_word,
    ),
    "lora-bert": (
        lambda: adapted(bert(), target_modules=["query", "value"], modules_to_save=["classifier"]),
        padded,
        classify,
    ),
    "dora-bert": (
        lambda: adapted(bert(), target_modules=["query"], use_dora=True),
        padded,
        classify,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_autograd(name: str) -> None:
    make, batch, objective = MODELS[name]
    torch.manual_seed(0)
    model, data = make().double().eval(), batch()
    expected = oracles.by_loop(Problem(name, make, batch, objective), model, data)
    tape = RecordGradients(model, objective=objective).record(data)
    torch.testing.assert_close(tape.norms(), oracles.norms(expected), rtol=1e-10, atol=0.0)
    weights = torch.rand(RECORDS, dtype=torch.float64)
    sums = tape.weighted_sum(weights)
    for parameter, value in oracles.weighted_sum(expected, weights).items():
        torch.testing.assert_close(sums[parameter], value, rtol=1e-9, atol=1e-12)


def test_the_tied_head_is_not_made_explicit() -> None:
    tape = RecordGradients(gpt2().eval(), objective=next_word).record(words_only())
    (tied,) = tape.parts["transformer.wte.weight"]
    assert isinstance(tied.factor, Sum)


def test_training_with_dropout_runs() -> None:
    model = bert().train()
    tape = RecordGradients(model, objective=classify).record(padded())
    assert tape.norms().isfinite().all()
    assert model.training
