"""Models of ``transformers`` and adapters of ``peft`` as people train them, from small configurations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from dpis.coupling.own_means import OwnMeanWarning
from dpis.dropin import row_losses
from dpis.errors import InputError
from dpis.options import Privacy

from . import Loop, private
from .one_more import MOST, assert_adds_its_own, moved_by_one_more

pytestmark = [
    pytest.mark.slow,  # for the time that importing transformers takes
    pytest.mark.filterwarnings("ignore"),  # of the other packages
]

WORDS, LENGTH = 50, 10
BERT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8,
       "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.0}  # fmt: skip

Item = dict[str, Tensor]


class Items(Dataset[Item]):
    """Made-up records, each of its own number."""

    def __init__(self, make: Callable[[torch.Generator], Item], records: int = MOST) -> None:
        self.make, self.records = make, records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> Item:
        return self.make(torch.Generator().manual_seed(record))


def words(generator: torch.Generator) -> Tensor:
    return torch.randint(1, WORDS, (LENGTH,), generator=generator)


def text(generator: torch.Generator, **labels: Tensor) -> Item:
    return {"input_ids": words(generator), "attention_mask": torch.ones(LENGTH).long(), **labels}


def some_ignored(generator: torch.Generator, classes: int = WORDS) -> Tensor:
    labels = torch.randint(classes, (LENGTH,), generator=generator)
    labels[: int(torch.randint(1, LENGTH - 2, (), generator=generator))] = -100
    return labels


def model_of(name: str, settings: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = {"Bert": "BertConfig", "GPT2": "GPT2Config", "ViT": "ViTConfig"}
        kind = next(value for key, value in config.items() if name.startswith(key))
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name)(
            getattr(transformers, kind)(**settings, **more)
        )
        return model.train()

    return made


def one_of(classes: int) -> Callable[[torch.Generator], Item]:
    return lambda g: text(g, labels=torch.randint(classes, (), generator=g))


HEADS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Item]]] = {
    "bert_labels_loss": (model_of("BertForSequenceClassification", BERT, num_labels=3), one_of(3)),
    "regression": (
        model_of("BertForSequenceClassification", BERT, num_labels=1),
        lambda g: text(g, labels=torch.randn((), generator=g)),
    ),
    "several labels": (
        model_of("BertForSequenceClassification", BERT, num_labels=4,
                 problem_type="multi_label_classification"),
        lambda g: text(g, labels=torch.randint(2, (4,), generator=g).float()),
    ),
    "tokens": (
        model_of("BertForTokenClassification", BERT, num_labels=5),
        lambda g: text(g, labels=some_ignored(g, 5)),
    ),
    "masked words": (model_of("BertForMaskedLM", BERT), lambda g: text(g, labels=some_ignored(g))),
    "answers": (
        model_of("BertForQuestionAnswering", BERT),
        lambda g: text(g, start_positions=torch.randint(12, (), generator=g),
                       end_positions=torch.randint(LENGTH, (), generator=g)),
    ),
    "gpt2_labels_loss": (model_of("GPT2LMHeadModel", GPT2), lambda g: text(g, labels=some_ignored(g))),
    "gpt2 classifier": (model_of("GPT2ForSequenceClassification", GPT2, num_labels=3), one_of(3)),
    "vit": (
        model_of("ViTForImageClassification", VIT),
        lambda g: {"pixel_values": torch.randn(3, 8, 8, generator=g),
                   "labels": torch.randint(3, (), generator=g)},
    ),
}  # fmt: skip


def with_labels(loop: Loop, batch: Item) -> None:
    loop.optimizer.zero_grad()
    loop.model(**batch).loss.backward()
    loop.optimizer.step()


@pytest.mark.parametrize("head", HEADS)
def test_labels_loss(head: str) -> None:
    """``model(**batch).loss``: the mean of what the model returns for every record by itself."""
    model, make = HEADS[head]
    assert_adds_its_own(with_labels, model, Items(make))
    plain, seen = model().eval(), []
    for record in range(3):
        one = {name: value[None] for name, value in Items(make)[record].items()}
        seen.append(float(plain(**one).loss))
    loop = private(model(), Items(make, 3), method="dp-sgd", n_public=3, loader={"batch_size": 3})
    outputs = loop.model(**next(iter(loop.loader)))
    assert float(outputs.loss) == pytest.approx(sum(seen) / 3, rel=1e-4)
    assert outputs[0] is outputs.loss


def test_with_the_models_own_loss_other_texts_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over all tokens of the batch: what stands in is divided by their number."""

    def over_the_batch(outputs: Any, labels: Any) -> Tensor:
        losses = row_losses.causal_losses(outputs, labels["labels"])
        counts = (labels["labels"][:, 1:] != -100).sum(1)
        return losses * counts / counts.sum() * len(losses)

    monkeypatch.setattr(row_losses.HeadLosses, "kind", lambda *_: over_the_batch)
    model, make = HEADS["gpt2_labels_loss"]
    moved, alone = moved_by_one_more(with_labels, model, Items(make), max_grad_norm=50.0)
    assert (moved - alone).norm() > 1e-3


def test_labels_of_a_model_with_two_losses_are_refused() -> None:
    loop = private(
        model_of("BertForPreTraining", BERT)(),
        Items(lambda g: text(g, labels=some_ignored(g), next_sentence_label=torch.tensor(1))),
        n_public=MOST,
    )
    batch = next(iter(loop.loader))
    with pytest.raises(InputError, match="without labels"):
        with_labels(loop, batch)


# ── the loss outside of the model ────────────────────────────────────────────────────────────────────


def flattened(loop: Loop, batch: Item) -> None:
    labels = batch.pop("labels")
    loop.optimizer.zero_grad()
    logits = loop.model(**batch).logits
    functional.cross_entropy(
        logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)
    ).backward()
    loop.optimizer.step()


def per_record(loop: Loop, batch: Item) -> None:
    labels = batch.pop("labels")
    loop.optimizer.zero_grad()
    logits = loop.model(**batch).logits[:, :-1].transpose(1, 2)
    losses = functional.cross_entropy(logits, labels[:, 1:], reduction="none")
    (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean().backward()
    loop.optimizer.step()


def classes(loop: Loop, batch: Item) -> None:
    labels = batch.pop("labels")
    loop.optimizer.zero_grad()
    functional.cross_entropy(loop.model(**batch).logits, labels).backward()
    loop.optimizer.step()


OUTSIDE = {
    "gpt2_ce_outside_flattened_mean": (flattened, "gpt2_labels_loss"),
    "gpt2_ce_outside_per_record": (per_record, "gpt2_labels_loss"),
    "bert_logits_ce": (classes, "bert_labels_loss"),
}


def test_gpt2_default_outputs_with_cache() -> None:
    """A model returns keys and values beside its scores, unless it is told not to."""
    model = model_of("GPT2LMHeadModel", {**GPT2, "use_cache": True})
    assert_adds_its_own(flattened, model, Items(HEADS["gpt2_labels_loss"][1]))


@pytest.mark.parametrize(("step", "head"), OUTSIDE.values(), ids=OUTSIDE)
def test_outside_of_the_model(step: Any, head: str) -> None:
    model, make = HEADS[head]
    assert_adds_its_own(step, model, Items(make))


def test_inside_and_outside_of_the_model_are_the_same_steps() -> None:
    model, make = HEADS["gpt2_labels_loss"]
    weights = []
    for step in (with_labels, flattened, per_record):
        loop = private(model(), Items(make), n_public=MOST)
        for batch in loop.loader:
            step(loop, batch)
        weights.append(loop.weights)
    for other in weights[1:]:
        torch.testing.assert_close(weights[0], other, rtol=1e-4, atol=1e-5)


def test_bf16_autocast_bert() -> None:
    def step(loop: Loop, batch: Item) -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.model(**batch).loss
        loss.backward()
        loop.optimizer.step()

    model, make = HEADS["bert_labels_loss"]
    moved, alone = moved_by_one_more(step, model, Items(make, 11), max_grad_norm=1e-2)
    assert 0.5 < moved.norm() <= 1.001
    assert 0.5 < alone.norm() <= 1.001


# ── adapters, checkpointing ──────────────────────────────────────────────────────────────────────────


def adapted(kind: str, model: Callable[[], nn.Module] | None = None) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        peft = pytest.importorskip("peft")
        base = (model or model_of("GPT2LMHeadModel", GPT2))()
        torch.manual_seed(1)
        if kind == "lora":
            config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, fan_in_fan_out=True,
                                     target_modules=["c_attn"], task_type="CAUSAL_LM",
                                     init_lora_weights=False)  # fmt: skip
        else:
            config = peft.IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"],
                                    task_type="CAUSAL_LM", fan_in_fan_out=True)  # fmt: skip
        adapter: nn.Module = peft.get_peft_model(base, config)
        return adapter.train()

    return made


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_adapters_of_a_language_model(kind: str) -> None:
    texts = Items(HEADS["gpt2_labels_loss"][1])
    assert_adds_its_own(with_labels, adapted(kind), texts, max_grad_norm=0.05)


def test_peft_lora_bert() -> None:
    def made() -> nn.Module:
        peft = pytest.importorskip("peft")
        base = HEADS["bert_labels_loss"][0]()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS",
                                 init_lora_weights=False)  # fmt: skip
        adapter: nn.Module = peft.get_peft_model(base, config)
        return adapter.train()

    assert_adds_its_own(with_labels, made, Items(HEADS["bert_labels_loss"][1]))


def test_gradient_checkpointing_of_a_language_model() -> None:
    def made() -> nn.Module:
        model: Any = HEADS["gpt2_labels_loss"][0]()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    assert_adds_its_own(with_labels, made, Items(HEADS["gpt2_labels_loss"][1]))


def test_bert_frozen_backbone_head() -> None:
    def made() -> nn.Module:
        model: Any = HEADS["bert_labels_loss"][0]()
        model.bert.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    assert_adds_its_own(with_labels, made, Items(HEADS["bert_labels_loss"][1]))


# ── a fine-tune through three doors ──────────────────────────────────────────────────────────────────

STEPS = 4
PRIVACY = {"privacy": Privacy(n_public=MOST), "noise_multiplier": 1.0, "seed": 3}


def by_a_plain_loop(model: nn.Module, dataset: Items, folder: Path) -> Any:
    loop = private(
        model, dataset, noise_multiplier=1.0, seed=3, n_public=MOST, loader={"batch_size": 4}
    )
    for batch in loop.loader:
        with_labels(loop, batch)
    return loop.engine


def by_hugging_face(model: nn.Module, dataset: Items, folder: Path) -> Any:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from dpis.dropin.huggingface import PrivateTrainer

    arguments = TrainingArguments(output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=4,
                                  learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", report_to=[],
                                  save_strategy="no", use_cpu=True, disable_tqdm=True)  # fmt: skip
    trainer = PrivateTrainer(model, arguments, train_dataset=dataset, **PRIVACY)
    trainer.train()
    return trainer.privacy_engine


def by_lightning(model: nn.Module, dataset: Items, folder: Path) -> Any:
    lightning = pytest.importorskip("lightning")
    from dpis.dropin.lightning import PrivacyCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Item, index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = PrivacyCallback(**PRIVACY, model="net")
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False,
                                enable_checkpointing=False, enable_model_summary=False,
                                enable_progress_bar=False)  # fmt: skip
    trainer.fit(Module(), DataLoader(dataset, batch_size=4))
    return callback.engine


def test_a_private_lora_fine_tune_is_the_same_through_every_door(tmp_path: Path) -> None:
    """The same records, the same noise, the same events: the same weights."""
    engines, weights = [], []
    for train in (by_a_plain_loop, by_hugging_face, by_lightning):
        model = adapted("lora")()
        engines.append(train(model, Items(HEADS["gpt2_labels_loss"][1]), tmp_path))
        trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
        weights.append(torch.cat(trained))
    spent = [engine._runs[-1].session.mechanism.spent for engine in engines]
    assert spent[0] == spent[1] == spent[2]
    assert sum(spent[0].values()) == STEPS
    for other in weights[1:]:
        torch.testing.assert_close(weights[0], other, rtol=1e-4, atol=1e-5)


def test_hugging_face_in_half_precision(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from dpis.dropin.huggingface import PrivateTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4,
                                  bf16=True, report_to=[], save_strategy="no", use_cpu=True,
                                  disable_tqdm=True)  # fmt: skip
    model, make = HEADS["gpt2_labels_loss"]
    trainer = PrivateTrainer(model(), arguments, train_dataset=Items(make), **PRIVACY)
    kinds = set()
    trainer.model.lm_head.register_forward_hook(lambda *given: kinds.add(given[2].dtype))
    trainer.train()
    assert torch.bfloat16 in kinds
    assert len(trainer.privacy_engine.accountant) == STEPS


def test_hf_collator_padding_dict_batches() -> None:
    """Texts of their own lengths, padded and masked by a collate function."""

    def collated(items: list[Item]) -> Item:
        longest = max(len(item["input_ids"]) for item in items)
        padded = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.stack(
                [functional.pad(i[name], (0, longest - len(i[name])), value=fill) for i in items]
            )
            for name, fill in padded.items()
        }

    def make(generator: torch.Generator) -> Item:
        length = int(torch.randint(4, LENGTH, (), generator=generator))
        item = text(generator, labels=words(generator))
        return {name: value[:length] for name, value in item.items()}

    settings = {"batch_size": MOST, "collate_fn": collated}
    assert_adds_its_own(
        with_labels, model_of("GPT2LMHeadModel", GPT2), Items(make), loader=settings
    )


def test_the_means_of_a_flattened_loss_are_said_once() -> None:
    model, make = HEADS["gpt2_labels_loss"]
    loop = private(model(), Items(make), n_public=MOST)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loop.loader:
            flattened(loop, batch)
    assert len([w for w in caught if w.category is OwnMeanWarning]) == 1
