import json
import subprocess
import sys
import time

import pytest

from dpis.app import main
from tests.accounting.test_verify import predeclared_header, write_run

PLAN = ["plan", "--epsilon", "1", "--n-public", "20000", "--batch-size", "200", "--epochs", "3"]


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def replaced(option, value):
    """The plan command with one option changed or added."""
    arguments = list(PLAN)
    if option in arguments:
        arguments[arguments.index(option) + 1] = value
        return arguments
    return [*arguments, option, value]


def test_plan_prints_a_readable_table(capsys):
    code, out, err = run(capsys, *PLAN, "--kappa", "1:0.5")
    assert (code, err) == (0, "")
    for word in (
        "epsilon by PLD",
        "by RDP",
        "noise sigma_G",
        "DP-SGD",
        "gradient",
        "300 steps (3 epochs of 100)",
    ):
        assert word in " ".join(out.split())


def test_plan_as_json_has_the_promised_keys(capsys):
    code, out, _ = run(capsys, *PLAN, "--kappa", "0.5", "--json")
    plan = json.loads(out)
    assert code == 0
    assert {"mode", "accountant", "epsilon_target", "epsilon", "epsilon_rdp", "delta"} <= set(plan)
    assert (plan["steps_per_epoch"], plan["steps"]) == (100, 300)
    for key in ("grad_noise_multiplier", "noise_multiplier_z", "sampling_rate", "equivalent_batch"):
        assert len(plan[key]) == 3
    assert plan["equivalent_batch"] == [400.0] * 3
    assert plan["epsilon"] <= plan["epsilon_target"] == 1.0
    assert plan["epsilon_rdp"] > plan["epsilon"]


def test_adaptive_plan_as_json_has_the_filter_terms(capsys):
    code, out, _ = run(capsys, *PLAN, "--method", "dpis-adaptive", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["mode"] == "adaptive"
    assert plan["epsilon"] <= 1.0
    assert {"alpha", "rho_budget", "norm_noise_multiplier"} <= set(plan)
    assert plan["grad_noise_multiplier"] == plan["noise_multiplier_z"]


def test_a_label_is_never_taken_for_markup(capsys):
    code, out, _ = run(capsys, *PLAN, "--accountant", "rdp", "--release", "[/foo]=50")
    assert code == 0
    assert "[/foo]" in out


def test_releases_are_paid_for(capsys):
    by_rdp = [*PLAN, "--accountant", "rdp", "--json"]
    alone = json.loads(run(capsys, *by_rdp)[1])
    beside = json.loads(run(capsys, *by_rdp, "--release", "mean=20", "--release", "K=90@epoch")[1])
    assert beside["noise_multiplier_z"][0] > alone["noise_multiplier_z"][0]
    assert [r["times"] for r in beside["releases"]] == [1, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        replaced("--epsilon", "0"),
        replaced("--epsilon", "-1"),
        replaced("--epsilon", "nan"),
        replaced("--epsilon", "inf"),
        replaced("--epsilon", "many"),
        replaced("--delta", "0"),
        replaced("--delta", "1"),
        replaced("--delta", "1e-11"),
        replaced("--delta", "0.5"),
        replaced("--epsilon", "1e-9"),
        replaced("--batch-size", "20001"),
        replaced("--batch-size", "0"),
        replaced("--batch-size", "1.5"),
        replaced("--epochs", "0"),
        replaced("--kappa", "0"),
        replaced("--kappa", "1.01"),
        replaced("--kappa", "0.001"),
        replaced("--kappa", "0.5,0.5"),
        [*replaced("--kappa", "0.5"), "--equivalent-batch", "400"],
        replaced("--adjacency", "replace-one"),
        replaced("--method", "hybrid"),
        replaced("--method", "sgd"),
        replaced("--accountant", "gdp"),
        [*replaced("--method", "dpis-adaptive"), "--accountant", "pld"],
        [*replaced("--method", "dpis-adaptive"), "--decay-rate", "0.01"],
        [*replaced("--method", "dpis-adaptive"), "--kappa", "0.5"],
        replaced("--reserve-share", "0.5"),
        replaced("--decay-rate", "0.01"),
        [*replaced("--method", "dp-sgd-decay"), "--decay-rate", "-1"],
        replaced("--release", "mean"),
        replaced("--release", "mean=0"),
        replaced("--release", "mean=inf"),
        replaced("--release", "mean=1e200"),
        replaced("--release", "mean=1e-200"),
        replaced("--epochs", "100000000000000000000"),
        replaced("--n-public", "1" + "0" * 400),
        replaced("--equivalent-batch", "inf"),
        replaced("--accountant", ""),
        [*replaced("--batch-size", "15000"), "--method", "dpis-adaptive"],
        replaced("--release", "mean=0.1"),
        replaced("--release", "mean=8@day"),
        [*replaced("--epsilon", "0.00001"), "--method", "dpis-adaptive"],
        ["plan"],
        ["fly"],
        ["plan", "--nonsense"],
        ["verify"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_clear_line_and_exit_code_2(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpis: error: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("--n-public", "9" * 26, "found " + "9" * 26),
        ("--n-public", "9" * 400, "found a whole number of more than 60 digits"),
        ("--release", "mean=inf", "found inf"),
        ("--epsilon", "1e-9", "epsilon = 1e-09 leaves nothing to learn from"),
        ("--delta", "0.5", "delta = 0.5 is no promise"),
    ],
)
def test_what_was_found_is_shown(capsys, option, value, shown):
    assert shown in run(capsys, *replaced(option, value))[2]


def test_a_delta_that_lets_records_be_published_is_warned_of(capsys):
    code, out, err = run(capsys, *PLAN, "--accountant", "rdp", "--delta", "1e-3", "--json")
    assert code == 0
    assert json.loads(out)["delta"] == 1e-3
    assert err.startswith("dpis: warning: delta is not below 1 / n_public")
    assert len(err.splitlines()) == 1


def test_verify_says_what_holds(capsys, tmp_path):
    header = predeclared_header(seeded=True)
    code, out, _ = run(capsys, "verify", str(write_run(tmp_path / "l", header)))
    assert code == 0
    assert out.startswith("holds: (epsilon = 1, delta = 1e-05)\nnot for release: seeded")


def test_verify_names_the_first_bad_line(capsys, tmp_path):
    path = write_run(tmp_path / "l", predeclared_header())
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"index":7', b'"index":8', 1))
    code, out, _ = run(capsys, "verify", str(path))
    assert code == 1
    assert "line 9" in out
    path.write_bytes(data[: len(data) // 2])
    code, out, _ = run(capsys, "verify", str(path))
    assert code == 1
    assert "unfinished" in out


@pytest.mark.parametrize("content", [None, b"", b"not a ledger\n", b"{}\n"])
def test_verify_refuses_what_is_no_ledger(capsys, tmp_path, content):
    path = tmp_path / "l"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, "verify", str(path))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_help_and_version(capsys):
    assert run(capsys, "--version")[1].startswith("dpis ")
    for arguments in ([], ["--help"], ["plan", "--help"], ["verify", "--help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "Usage" in out


@pytest.mark.slow
def test_planning_does_not_load_torch():
    code = "import sys, dpis.app; dpis.app.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *PLAN, "--accountant", "rdp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "300 steps" in done.stdout


@pytest.mark.slow
def test_a_plan_with_thirty_kappas_is_made_in_seconds(capsys):
    kappas = ",".join(f"{1 - 0.02 * i:.2f}" for i in range(30))
    arguments = ["--epsilon", "1", "--n-public", "60000", "--batch-size", "512", "--epochs", "30"]
    begin = time.process_time()
    code, out, _ = run(capsys, "plan", *arguments, "--kappa", kappas, "--json")
    assert code == 0
    assert len(set(json.loads(out)["sampling_rate"])) == 30
    assert (
        time.process_time() - begin < 30
    )  # three times the promise: fails on another algorithm, not on a busy machine
