"""Seventy loops as people write them for Opacus, by name: which run unchanged here, and which are refused.

Each is a test of this folder, by its name or as one of its parameters. To count: ``pytest
tests/dropin/loops/test_count.py -s -n0``.
"""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent

RUN = """
    bert_logits_ce gpt2_ce_outside_flattened_mean gpt2_ce_outside_per_record
    gpt2_default_outputs_with_cache hf_collator_padding_dict_batches grad_accumulation_bmm
    microbatches_split_in_loop adamw_groups_scheduler hf_get_scheduler_and_clip_grad_norm
    compile_before_make_private compile_after_make_private bf16_autocast bf16_autocast_bert
    bf16_model_weights resnet18_bn_fix resnet18_frozen_bn_eval_backbone
    frozen_backbone_two_modules_head_private bert_frozen_backbone_head loss_label_smoothing
    loss_class_weights_and_smoothing_reduction_none loss_bce_logits_squeeze
    loss_bce_multilabel_pos_weight loss_mse loss_sum_reduction workers_shuffle
    subset_random_split_generator uint8_to_float_in_loop ema_model_deepcopy
    eval_each_epoch_and_save_load_state_dict output_dict_and_aux_heads vae
    dropout_and_checkpointing_encoder peft_lora_bert last_partial_epoch_len_b_not_dividing
    zero_grad_set_after_backward_order model_zero_grad accelerate_prepare lstm_packed_sequences
    bert_labels_loss gpt2_labels_loss log_grad_norm_after_step
    resnet18_frozen_bn_backbone_head_trained gradual_unfreezing loss_class_weights
    loss_ignore_index loss_token_ignore_index loss_bce_logits_squeeze_inside_model
    loss_mse_1d_model hf_dataset_with_format_torch workers_shuffle_pin_droplast
    two_forward_per_step_siamese checkpoint_bytesio accountant_history_and_steps
    accountant_state_dict model_remove_hooks_to_standard one_engine_twice noise_multiplier_zero
""".split()  # noqa: SIM905

REFUSED = """
    grad_accumulation_skip_step gradscaler resnet18_bn_unfixed loss_l2_penalty_in_loss
    loss_contrastive_in_batch iterable_dataset hf_dataset_streaming webdataset_like
    weighted_random_sampler input_noise_augment_in_loop mixup_in_loop train_past_epochs
    submodule_call_model_encode
""".split()  # noqa: SIM905
"""Each with the harm and the edit."""


def written() -> dict[str, bool]:
    """Names of tests and texts of their parameters, in small letters; of tests, whether they end in an error alone."""
    found: dict[str, bool] = {}
    for path in sorted(HERE.glob("test_*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.setdefault(node.value.lower(), False)
            if isinstance(node, ast.FunctionDef):
                own = {sub.attr for sub in ast.walk(node) if isinstance(sub, ast.Attribute)}
                found[node.name.lower().removeprefix("test_")] = "raises" in own
    return found


def test_at_least_fifty_five_run_unchanged() -> None:
    names = [*RUN, *REFUSED]
    assert len(set(names)) == len(names) == 70
    known = written()
    assert not [name for name in names if name not in known]
    print(f"{len(RUN)} of {len(names)} run unchanged, {len(REFUSED)} are refused")
    assert len(RUN) >= 55


def test_what_is_refused_is_tested_for_its_error() -> None:
    known = written()
    by_parameter = {"loss_contrastive_in_batch", "input_noise_augment_in_loop", "mixup_in_loop"}
    assert {name for name in REFUSED if not known[name]} == by_parameter
