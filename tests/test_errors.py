import pickle

import pytest

from dpis import errors
from dpis.training.interrupt import InterruptedRunError

EXAMPLES = [
    errors.InputError("no"),
    errors.GradientError("no"),
    errors.BudgetExceededError("no"),
    errors.LedgerError("no"),
    errors.BrokenLedgerError(3, "no"),
    InterruptedRunError("no"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_pass_from_a_worker_to_whoever_asked(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert isinstance(again, errors.DpisError)
