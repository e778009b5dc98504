"""Rows that no run gave: made up for tests alone, with accuracies that are obviously none of ours."""

from __future__ import annotations

import functools
import math

from dpis.accounting import Budget, Gaussian, Workload, next_grad_noise, plan_adaptive
from dpis.accounting.adaptive import adaptive_step
from dpis.accounting.renyi import renyi_divergence
from reproduction import published

N, BATCH, EPOCHS = 60_000, 512, 16
MACHINE = "made up, 2 cores"


def row(**changes):
    """One row, as results/*.jsonl holds them."""
    made = {
        "table": "table3",
        "dataset": "fmnist",
        "method": "dp-sgd",
        "recipe": "paper",
        "epsilon": 1.0,
        "delta": 1e-5,
        "seed": 1,
        "test_accuracy": 0.5,
        "accountant": "rdp",
        "wall_seconds": 90.0,
        "gradient_evaluations": 960_000,
        "command": "dpis train fmnist --method dp-sgd --epsilon 1 --seed 1",
        "commit": "0000000",
        "machine": MACHINE,
        "claim": {"epsilon": 1.0, "delta": 1e-5, "n_public": N, "n_public_source": "released"},
        "options": {},
        "history": [],
        "ledger_sha256": "0" * 64,
        "verified": True,
    }
    made |= changes
    if "claim" not in changes and made["epsilon"] is not None:
        made["claim"] = made["claim"] | {"epsilon": made["epsilon"]}
    return made


def falling_kappa(epochs=EPOCHS, last=0.35):
    """Utilisation as it falls while a model learns."""
    return [last + (1 - last) * math.exp(-0.35 * epoch) for epoch in range(epochs)]


@functools.cache
def adaptive_history(epsilon, kappas=None, a_e=0.8, last=0.35):
    """What an adaptive run would have done with these kappas, by the real planner; not changed by callers."""
    kappas = falling_kappa(last=last) if kappas is None else kappas
    workload = Workload.create(n_public=N, batch_size=BATCH, epochs=len(kappas))
    plan = plan_adaptive(Budget(epsilon, 1e-5), workload, reserve_share=a_e)
    norm_sum = renyi_divergence(Gaussian(noise_multiplier=plan.norm_noise_multiplier), plan.order)
    spent, history = 0.0, []
    for epoch, kappa in enumerate(kappas, start=1):
        spent += norm_sum
        sigma = next_grad_noise(plan, epoch=epoch, kappa=kappa, spent=spent)
        step = adaptive_step(workload, sigma, kappa)
        spent += workload.steps_per_epoch * renyi_divergence(step, plan.order)
        history.append(
            {
                "epoch": epoch,
                "kappa": kappa,
                "clip_norm": 0.1,
                "grad_noise_multiplier": sigma,
                "noise_multiplier": sigma / kappa,
                "sampling_rate": step.sampling_rate,
                "held_out_accuracy": 0.5 + 0.02 * epoch,
            }
        )
    return history


def many_rows():
    """A grid with holes, two recipes, both accounts: enough for every part of the page."""
    made = []
    for dataset, grids in published.TABLE_3.items():
        if dataset == "cifar10":
            continue
        for method, grid in grids.items():
            for epsilon, figure in zip(grid.values, grid.figures, strict=True):
                for seed in (1, 2, 3) if dataset == "fmnist" else (1, 2):
                    value = (figure - 3 + 0.13 * seed + (epsilon > 2) * 3.1) / 100
                    adaptive = method == "dpis-adaptive"
                    made.append(
                        row(
                            dataset=dataset,
                            method=method,
                            epsilon=epsilon,
                            seed=seed,
                            test_accuracy=value,
                            gradient_evaluations=400_000
                            if adaptive
                            else 900_000 + 1000 * len(method),
                            history=adaptive_history(epsilon, last=0.3 + 0.04 * epsilon)
                            if adaptive
                            else [],
                            command=f"dpis train {dataset} --method {method} --epsilon {epsilon:g} --seed {seed}",
                        )
                    )
        made.append(
            row(
                dataset=dataset,
                method="sgd",
                epsilon=None,
                accountant=None,
                claim=None,
                verified=None,
                test_accuracy=0.777,
                ledger_sha256=None,
            )
        )
    for recipe, account, gain in (
        ("large-batch", "rdp", 0.8),
        ("ema", "pld", 1.1),
        ("paper", "pld", 0.2),
    ):
        for epsilon in (1.0, 3.0):
            figure = published.TABLE_3["fmnist"]["dp-sgd-hf"].at(epsilon)
            made.append(
                row(
                    method="dp-sgd-hf",
                    recipe=recipe,
                    accountant=account,
                    epsilon=epsilon,
                    test_accuracy=(figure - 2 + gain) / 100,
                    gradient_evaluations=2_300_000,
                )
            )
    made.append(
        row(method="dpis", accountant="pld", test_accuracy=0.812, gradient_evaluations=310_000)
    )
    for a_e in (0.0, 0.8):
        made.append(
            row(table="table5", method="dpis-adaptive", test_accuracy=0.84, options={"a_e": a_e})
        )
    made.append(row(table="table6", method="dpis-adaptive", test_accuracy=0.871, options={"k": 3}))
    for clip in ("auto", "0.1"):
        made.append(
            row(
                table="table4",
                method="dpis-adaptive",
                test_accuracy=0.83,
                options={"clip_norm": clip},
            )
        )
    return made
