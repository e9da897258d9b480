"""What a worker reads of its rank is what was written, or an error."""

import pytest
from hvdlite_wire.codec import MessageError
from hvdlite_wire.store_requests import ANSWERS, Dismissal, RankAssignment


@pytest.mark.parametrize("answer", [RankAssignment(4, 1, 2, 0), Dismissal("b has been removed")])
def test_an_answer_comes_out_as_it_went_in(answer):
    assert ANSWERS.decode(ANSWERS.encode(answer)) == answer


@pytest.mark.parametrize("value", [b"", b"{}", b'["assigned",1,0,2]', b'["assigned",1,0,2,-1]', b'["dismissed",1]'])
def test_anything_else_is_an_error(value):
    with pytest.raises(MessageError):
        ANSWERS.decode(value)
