"""What workers get of the launcher's environment."""

import pytest
from hvdlite_launcher.environment import chosen_environment
from hvdlite_launcher.errors import UsageError

HERE = {"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py", "API_KEY": "s3cret", "E": ""}
NEEDED = {"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py"}


def test_all_goes_along_unless_the_user_says_otherwise():
    assert chosen_environment(HERE, [], inherit=True) == HERE
    assert chosen_environment(HERE, [], inherit=False) == NEEDED


def test_a_variable_is_added_with_its_value_here_or_the_one_given():
    exports = ["API_KEY", "E", "NEW=a=b", "EMPTY=", "HOME=/tmp"]
    added = {"API_KEY": "s3cret", "E": "", "NEW": "a=b", "EMPTY": "", "HOME": "/tmp"}
    assert chosen_environment(HERE, exports, inherit=False) == {**NEEDED, **added}


def test_of_two_values_the_later_counts():
    assert chosen_environment({}, ["A=1", "A=2"], inherit=True) == {"A": "2"}
    assert chosen_environment({"A": "0"}, ["A=1", "A"], inherit=True) == {"A": "0"}


@pytest.mark.parametrize("export", ["=s3cret", "", "HVDLITE_SIZE=s3cret", "HVDLITE_STORE"])
def test_what_cannot_be_given_is_refused_without_a_word_of_its_value(export):
    with pytest.raises(UsageError, match=r"^-x: ") as error:
        chosen_environment(HERE, [export], inherit=True)
    assert "s3cret" not in str(error.value)


def test_a_name_that_is_not_set_here_is_told_how_to_give_a_value():
    with pytest.raises(UsageError, match="'GONE' is not set here; say -x NAME=VALUE"):
        chosen_environment(HERE, ["GONE"], inherit=True)
