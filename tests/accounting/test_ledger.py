import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpis.accounting import (
    Adjacency,
    Budget,
    CountSource,
    Entry,
    Gaussian,
    Header,
    LedgerWriter,
    Mode,
    PlannedRun,
    PoissonGaussian,
    read_ledger,
)
from dpis.accounting import ledger_writer as writer_module
from dpis.accounting.events import event_to_json
from dpis.accounting.ledger import CHAIN_ROOT, encode_line
from dpis.errors import BrokenLedgerError, BudgetExceededError, DpisError, InputError, LedgerError

STEP = PoissonGaussian(sampling_rate=0.1, noise_multiplier=3.0)
RUNS = (PlannedRun("mean", Gaussian(noise_multiplier=20.0), 1), PlannedRun("gradient", STEP, 4))
MODEL = "ab" * 32


def header(**changes):
    fields = {
        "claim": Budget(1.0, 1e-5),
        "adjacency": Adjacency.ADD_REMOVE,
        "n_public": 1000,
        "n_public_source": CountSource.GIVEN,
        "mode": Mode.PREDECLARED,
        "planned": RUNS,
        "versions": {"dpis": "0"},
    }
    return Header(**{**fields, **changes})


def write(path, *, steps=4, finish=True, **changes):
    with LedgerWriter.create(path, header(**changes)) as ledger:
        ledger.record("mean", RUNS[0].event)
        for _ in range(steps):
            ledger.record("gradient", STEP)
        if finish:
            ledger.finish(MODEL)
    return path


def test_what_was_written_is_read_back(tmp_path):
    ledger = read_ledger(write(tmp_path / "l.jsonl", seeded=True))
    assert ledger.header == header(seeded=True)
    assert [entry.event for entry in ledger.entries] == [RUNS[0].event] + [STEP] * 4
    assert ledger.end is not None
    assert (ledger.end.events, ledger.end.model_sha256) == (5, MODEL)
    assert not ledger.torn


def law_only_what_is_public_stands_in_a_ledger(path):
    """No times, no batch sizes, no losses: exactly these fields."""
    lines = [json.loads(line) for line in write(path).read_text().splitlines()]
    assert set(lines[0]) == {
        "type", "format", "claim", "adjacency", "n_public", "n_public_source", "mode", "planned", "filter_order",
        "versions", "seeded", "diagnostics", "norms", "unit", "chain",
    }  # fmt: skip
    assert all(set(line) == {"type", "index", "label", "event", "chain"} for line in lines[1:-1])
    assert set(lines[-1]) == {"type", "events", "model_sha256", "chain"}


def test_shards_stand_in_the_header_where_there_are_several(tmp_path):
    """A ledger from before there were several has no such field: one shard, and the same bytes."""
    assert read_ledger(write(tmp_path / "several", shards=64)).header.shards == 64
    assert read_ledger(write(tmp_path / "one")).header.shards == 1
    assert b"shards" not in (tmp_path / "one").read_bytes()
    for wrong in (0, 3, -2):
        with pytest.raises(InputError, match="power of two"):
            header(shards=wrong)


@pytest.mark.parametrize("said", [1, 3, "64", 64.0])
def test_shards_are_said_in_one_way(tmp_path, said):
    path = write(tmp_path / "l.jsonl", steps=0, finish=False, shards=64)
    body = json.loads(path.read_text().splitlines()[0])
    del body["chain"]
    path.write_bytes(encode_line(body | {"shards": said}, CHAIN_ROOT)[0])
    with pytest.raises(LedgerError, match="nothing checkable"):
        read_ledger(path)


def test_only_what_is_public_stands_in_a_ledger(tmp_path):
    law_only_what_is_public_stands_in_a_ledger(tmp_path / "l.jsonl")


def test_the_same_run_writes_the_same_bytes(tmp_path):
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ledger") / "l.jsonl").read_bytes()


def reading(folder, data):
    path = folder / "changed.jsonl"
    path.write_bytes(data)
    return read_ledger(path)


def noticed(folder, data):
    """Reading fails, or the ledger no longer counts as finished."""
    try:
        return reading(folder, data).end is None
    except DpisError:
        return True


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_noticed(finished, tmp_path, data):
    position = data.draw(st.integers(0, len(finished) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != finished[position]))
    assert noticed(tmp_path, finished[:position] + bytes([byte]) + finished[position + 1 :])


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_inserted_or_removed_byte_is_noticed(finished, tmp_path, data):
    position = data.draw(st.integers(0, len(finished) - 1))
    assert noticed(tmp_path, finished[:position] + finished[position + 1 :])
    byte = data.draw(st.integers(0, 255))
    assert noticed(tmp_path, finished[:position] + bytes([byte]) + finished[position:])


def law_any_line_cut_is_noticed(folder, data):
    lines = data.splitlines(keepends=True)
    for cut in range(len(lines)):
        assert noticed(folder, b"".join(lines[:cut] + lines[cut + 1 :]))
        assert noticed(folder, b"".join(lines[:cut] + lines[cut : cut + 1] + lines[cut:]))
    for first in range(1, len(lines) - 1):
        swapped = [*lines[:first], lines[first + 1], lines[first], *lines[first + 2 :]]
        if swapped != lines:
            assert noticed(folder, b"".join(swapped))


def law_lines_of_two_runs_do_not_mix(folder):
    """A header from elsewhere is itself intact; only the chain ties the events to their own claim."""
    ours = write(folder / "ours").read_bytes().splitlines(keepends=True)
    other = write(folder / "other", claim=Budget(8.0, 1e-5)).read_bytes().splitlines(keepends=True)
    assert noticed(folder, b"".join(other[:1] + ours[1:]))
    assert noticed(folder, b"".join(ours[:1] + other[1:]))


def test_lines_of_two_runs_do_not_mix(tmp_path):
    law_lines_of_two_runs_do_not_mix(tmp_path)


def test_any_line_cut_doubled_or_moved_is_noticed(finished, tmp_path):
    law_any_line_cut_is_noticed(tmp_path, finished)


def test_the_first_bad_line_is_named(finished, tmp_path):
    lines = finished.splitlines(keepends=True)
    lines[3] = lines[3].replace(b"3.0", b"9.0")
    with pytest.raises(BrokenLedgerError, match="line 4") as caught:
        reading(tmp_path, b"".join(lines))
    assert caught.value.line == 4


def test_every_torn_tail_is_said_and_counts_as_spent(finished, tmp_path):
    lines = finished.splitlines(keepends=True)
    whole = b"".join(lines[:3])
    for length in range(1, len(lines[3])):
        ledger = reading(tmp_path, whole + lines[3][:length])
        assert ledger.torn
        assert len(ledger.entries) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"hello",
        b"{}\n",
        b"[]\n",
        b'{"type":"header","format":"other/1"}\n',
        b"\xff\xfe\n",
        b"[" * 9999,
    ],
)
def test_foreign_files_are_refused(tmp_path, data):
    with pytest.raises(LedgerError):
        reading(tmp_path, data)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="cannot read"):
        read_ledger(tmp_path / "none")
    with pytest.raises(LedgerError, match="cannot read"):
        read_ledger(tmp_path)


def test_an_existing_ledger_is_never_written_over(tmp_path):
    path = write(tmp_path / "l.jsonl")
    with pytest.raises(InputError, match="never written over"):
        LedgerWriter.create(path, header())
    with pytest.raises(InputError, match="finished"):
        LedgerWriter.reopen(path)
    with pytest.raises(InputError, match="cannot write"):
        LedgerWriter.create(tmp_path / "no" / "folder", header())


def law_an_event_beyond_the_plan_is_never_recorded(path):
    write(path, finish=False)
    with LedgerWriter.reopen(path) as ledger, pytest.raises(BudgetExceededError):
        ledger.record("gradient", STEP)
    assert len(read_ledger(path).entries) == 5


def test_an_event_beyond_the_plan_is_never_recorded(tmp_path):
    law_an_event_beyond_the_plan_is_never_recorded(tmp_path / "l.jsonl")


def test_a_refusal_in_the_middle_keeps_what_came_before(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = LedgerWriter.create(path, header())
    with pytest.raises(BudgetExceededError):
        ledger.record_all([Entry("mean", RUNS[0].event)] + [Entry("gradient", STEP)] * 9)
    ledger.finish(MODEL)
    assert len(read_ledger(path).entries) == 5


def test_reopening_goes_on_where_the_ledger_stood(tmp_path):
    unbroken = write(tmp_path / "a").read_bytes()
    for steps in range(5):
        path = write(tmp_path / f"b{steps}", steps=steps, finish=False)
        with path.open("ab") as file:
            file.write(b'{"type":"event","ind')
        with LedgerWriter.reopen(path) as ledger:
            assert ledger.recorded == steps + 1
            for _ in range(4 - steps):
                ledger.record("gradient", STEP)
            ledger.finish(MODEL)
        assert path.read_bytes() == unbroken


def test_two_writers_at_once_are_refused_and_nothing_is_touched(tmp_path):
    path = tmp_path / "l.jsonl"
    with LedgerWriter.create(path, header()):
        with path.open("ab") as file:
            file.write(b'{"type":"event","ind')  # the first writer in the middle of a line
        before = path.read_bytes()
        with pytest.raises(InputError, match="another process"):
            LedgerWriter.reopen(path)
        assert path.read_bytes() == before


def changed_line(data, number, **changes):
    """The ledger with fields of one line replaced and the whole chain made anew: a careful hand."""
    bodies = [json.loads(line) for line in data.splitlines()]
    bodies[number - 1].update(changes)
    chain, lines = CHAIN_ROOT, []
    for body in bodies:
        body.pop("chain")
        line, chain = encode_line(body, chain)
        lines.append(line)
    return b"".join(lines)


RUN = {"label": "gradient", "event": event_to_json(STEP), "count": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"claim": {"epsilon": True, "delta": 1e-5}},
        {"claim": {"epsilon": "1", "delta": 1e-5}},
        {"claim": {"epsilon": 10**400, "delta": 1e-5}},
        {"claim": {"epsilon": 1.0}},
        {"n_public": -5},
        {"n_public": True},
        {"n_public": 1.9},
        {"seeded": 0},
        {"diagnostics": None},
        {"filter_order": "abc"},
        {"filter_order": 8},
        {"mode": "open"},
        {"adjacency": "replace-one"},
        {"planned": []},
        {"planned": [{**RUN, "count": 2.9}]},
        {"planned": [{**RUN, "count": -5}]},
        {"planned": [{**RUN, "count": 10**400}]},
        {"planned": [{**RUN, "repeat": 9}]},
        {"planned": [{**RUN, "event": {"kind": "gaussian", "noise_multiplier": 1e-160}}]},
        {"not_for_release": True},
        {"versions": []},
    ],
    ids=str,
)
def test_a_header_that_is_not_understood_is_not_trusted(finished, tmp_path, changes):
    with pytest.raises(LedgerError):
        reading(tmp_path, changed_line(finished, 1, **changes))


def test_an_unchanged_header_chained_anew_is_still_read(finished, tmp_path):
    assert changed_line(finished, 1) == finished
    assert reading(tmp_path, finished).end is not None


@pytest.mark.parametrize(
    "change", [{"repeat": 1000}, {"index": True}, {"label": 3}, {"type": "gift"}], ids=str
)
def test_a_line_that_is_not_understood_is_not_trusted(finished, tmp_path, change):
    with pytest.raises(BrokenLedgerError, match="line 3"):
        reading(tmp_path, changed_line(finished, 3, **change))


def test_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    path = tmp_path / "l.jsonl"
    ledger = LedgerWriter.create(path, header())

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module.os, "fsync", full)
    with pytest.raises(LedgerError, match=r"No space left.*not released"):
        ledger.record("mean", RUNS[0].event)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="closed"):
        ledger.record("gradient", STEP)


def law_an_event_is_on_disk_before_record_returns(path):
    synced = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module.os, "fsync", synced.append)
        with LedgerWriter.create(path, header()) as ledger:
            for count, run in enumerate(RUNS, start=1):
                synced.clear()
                ledger.record(run.label, run.event)
                assert len(read_ledger(path).entries) == count  # nothing waits in a buffer
                assert synced  # and the disk was waited for


def test_an_event_is_on_disk_before_record_returns(tmp_path):
    law_an_event_is_on_disk_before_record_returns(tmp_path / "l.jsonl")


@pytest.mark.slow
def test_a_killed_process_leaves_every_event_behind(tmp_path):
    path = tmp_path / "l.jsonl"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.accounting.test_ledger import *\n"
        "ledger = LedgerWriter.create(Path(sys.argv[1]), header())\n"
        "ledger.record('mean', RUNS[0].event)\n"
        "ledger.record('gradient', STEP)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, cwd=root)
    assert len(read_ledger(path).entries) == 2


def test_headers_that_cannot_be_checked_are_refused():
    with pytest.raises(InputError, match="planned"):
        header(planned=())
    with pytest.raises(InputError, match="no filter"):
        header(filter_order=8)
    with pytest.raises(InputError, match="Renyi order"):
        header(mode=Mode.ADAPTIVE, planned=())
    with pytest.raises(InputError, match="no plan"):
        header(mode=Mode.ADAPTIVE, filter_order=8)
    with pytest.raises(InputError, match="not predeclared"):
        header(n_public_source=CountSource.RELEASED)
    with pytest.raises(InputError, match="n_public"):
        header(n_public=0)
    with pytest.raises(InputError, match="zero-out"):
        header(n_public_source=CountSource.DATASET_LENGTH)
    header(n_public_source=CountSource.DATASET_LENGTH, adjacency=Adjacency.ZERO_OUT)


def law_other_adjacencies_are_refused(folder):
    """By name, and in a ledger that claims one of them."""
    written = write(folder / "l.jsonl").read_bytes()
    for name in ("replace-one", "swap", ""):
        with pytest.raises(InputError, match="add-remove"):
            Adjacency.parse(name)
        with pytest.raises(LedgerError):
            reading(folder, changed_line(written, 1, adjacency=name))


def test_other_adjacencies_are_refused(tmp_path):
    law_other_adjacencies_are_refused(tmp_path)


def law_events_of_an_unknown_kind_are_refused(folder):
    """Planned or recorded: what cannot be accounted for is not read over."""
    written = write(folder / "l.jsonl").read_bytes()
    laplace = {"kind": "laplace", "noise_multiplier": 3.0}
    with pytest.raises(LedgerError):
        reading(folder, changed_line(written, 1, planned=[{**RUN, "event": laplace}]))
    with pytest.raises(BrokenLedgerError, match="unknown kind"):
        reading(folder, changed_line(written, 3, event=laplace))


def test_events_of_an_unknown_kind_are_refused(tmp_path):
    law_events_of_an_unknown_kind_are_refused(tmp_path)


def test_a_model_hash_has_the_form_of_one(tmp_path):
    ledger = LedgerWriter.create(tmp_path / "l.jsonl", header())
    with pytest.raises(InputError, match="sha256"):
        ledger.finish("abc")
    ledger.close()
