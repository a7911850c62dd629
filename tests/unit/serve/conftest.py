"""What the tests of the server share."""

import pytest

from zendaya import Model
from zendaya.serve.served import Served


@pytest.fixture(scope="session")
def tiny():
    return Served("tiny", Model.from_preset("tiny", seed=3))
