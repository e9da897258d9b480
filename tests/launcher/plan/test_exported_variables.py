"""Which of the launcher's environment variables workers get."""

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.worker_environment import chosen_environment

HERE = {"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py", "API_KEY": "s3cret", "E": ""}
NEEDED = {"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py"}


def test_all_goes_along_unless_the_user_says_otherwise():
    assert chosen_environment(HERE, [], inherit=True).here == HERE
    assert chosen_environment(HERE, [], inherit=False).here == NEEDED


def test_a_variable_is_added_with_its_value_here_or_the_one_given():
    exports = ["API_KEY", "E", "NEW=a=b", "EMPTY=", "HOME=/tmp"]
    added = {"API_KEY": "s3cret", "E": "", "NEW": "a=b", "EMPTY": "", "HOME": "/tmp"}
    assert chosen_environment(HERE, exports, inherit=False).here == {**NEEDED, **added}


def test_of_two_values_the_later_counts():
    assert chosen_environment({}, ["A=1", "A=2"], inherit=True).here == {"A": "2"}
    assert chosen_environment({"A": "0"}, ["A=1", "A"], inherit=True).here == {"A": "0"}


@pytest.mark.parametrize("export", ["=s3cret", "", "HVDLITE_SIZE=s3cret", "HVDLITE_STORE"])
def test_what_cannot_be_given_is_refused_without_a_word_of_its_value(export):
    with pytest.raises(UsageError, match=r"^-x: ") as error:
        chosen_environment(HERE, [export], inherit=True)
    assert "s3cret" not in str(error.value)


def test_a_name_that_is_not_set_here_is_told_how_to_give_a_value():
    with pytest.raises(UsageError, match="'GONE' is not set here: write -x NAME=VALUE"):
        chosen_environment(HERE, ["GONE"], inherit=True)


def test_what_belongs_to_one_host_or_login_stays_there_unless_it_is_named():
    ours = {"PATH": "/venv/bin", "VIRTUAL_ENV": "/venv", "API_KEY": "s3cret", "NCCL_DEBUG": "INFO", "TERM": "xterm"}
    theirs = dict.fromkeys(
        (
            *("HOME", "HOSTNAME", "SSH_AUTH_SOCK", "DISPLAY", "XDG_RUNTIME_DIR", "TMPDIR", "CUDA_VISIBLE_DEVICES"),
            *("PWD", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "BASH_FUNC_module%%"),
        ),
        "of this host",
    )
    environment = chosen_environment({**ours, **theirs}, ["HOME", "CUDA_VISIBLE_DEVICES=1"], inherit=True)
    assert environment.elsewhere == {**ours, "HOME": "of this host", "CUDA_VISIBLE_DEVICES": "1"}
    of_a_rank = {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}  # workers would take themselves for ranks of that job
    here = {name: value for name, value in theirs.items() if name not in of_a_rank}
    assert environment.here == {**ours, **here, "CUDA_VISIBLE_DEVICES": "1"}


def test_another_host_is_sent_nothing_but_what_is_named_if_nothing_is_to_be_inherited():
    assert chosen_environment(HERE, ["API_KEY"], inherit=False).elsewhere == {"API_KEY": "s3cret"}
