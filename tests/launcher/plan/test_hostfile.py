"""The syntax of hostfiles, and the one line for each error in them."""

import pytest
from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.hosts import AUTO, Host, parse_hostfile, read_hostfile
from hypothesis import given
from hypothesis import strategies as st

EVERY_FORM = """\
# of Horovod, OpenMPI and MPICH

node1 slots=4
  user@node2 slots = 4 max-slots=8  # with a comment
node3:2
[fd00::1]:3
[fd00::2] slots=2 max_slots=2
node4
node5 slots=auto
node6 max-slots=3
"""

WORDS = st.sampled_from(
    ["a", "b", "user@c", "[::1]", ":", "2", "slots", "max-slots", "=", "auto", "0", "#", " ", "\t", "\n", "\r\n", "\0"]
)


def test_every_form_of_a_line_is_read():
    assert parse_hostfile(EVERY_FORM) == (
        Host("node1", 4),
        Host("node2", 4, "user"),
        Host("node3", 2),
        Host("fd00::1", 3),
        Host("fd00::2", 2),
        Host("node4", 1),
        Host("node5", AUTO),
        Host("node6", 1),
    )


def test_a_host_in_two_lines_is_one_host_with_the_slots_of_both():
    assert parse_hostfile("a slots=2\nb\na:3") == (Host("a", 5), Host("b", 1))


def test_a_file_from_another_system_reads_the_same(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1 slots=4\r\n\r\n# more\r\nnode2\r\n")
    assert read_hostfile(str(tmp_path / "hosts")) == (Host("node1", 4), Host("node2", 1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a:", "'a:' is not host:slots, such as node1:4"),
        ("a:-1", "'a:-1' is not host:slots"),
        ("fd00::1 slots=2", "'fd00::1' is not host:slots; an IPv6 address goes in brackets"),
        ("slots=4", "'slots=4' is not host:slots"),
        ("a slots=x", "'slots=x' is not slots=N; each line is a host, such as: node1 slots=4"),
        ("a slots=", "'slots=' is not slots=N"),
        ("a slots=-1", "'slots=-1' is not slots=N"),
        ("a slots=0", "'slots=0' has 0 slots"),
        ("a slots=9999999", "'slots=9999999' has too many slots: at most 999999"),
        ("a 4", "'4' is not slots=N"),
        ("a max-slots=auto", "'max-slots=auto' is not slots=N"),
        ("a slots=4 max-slots=2", "'a slots=4 max-slots=2' has more slots than its max-slots"),
        ("a slots=4 slots=4", "'a slots=4 slots=4' gives the number of slots twice"),
        ("a:4 slots=4", "'a:4 slots=4' gives the number of slots twice"),
        ("a\xff", "'a"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line, said, tmp_path, capsys):
    path = tmp_path / "hosts"
    path.write_bytes(b"# comment\n\ngood slots=1\n" + line.encode("latin-1") + b"\n")
    assert hvdlite_run.main(["--hostfile", str(path), "true"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hvdlite-run: --hostfile {path}, line 4: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_a_file_without_a_host_is_told_what_a_line_is(text, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=r"hosts: it names no host; each line is a host, such as: node1 slots=4"):
        read_hostfile(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/no/such", "--hostfile /no/such: no such file or directory"),
        ("/", "--hostfile /: is a directory"),
        ("", "--hostfile '': no such file or directory"),
        ("two\nlines", "--hostfile 'two\\nlines': no such file or directory"),
        ("/dev/zero", "--hostfile /dev/zero: too large for a hostfile"),
    ],
)
def test_a_file_that_cannot_be_one_is_named(path, said):
    with pytest.raises(UsageError) as error:
        read_hostfile(path)
    assert str(error.value).startswith(said)


@given(st.text() | st.lists(WORDS).map("".join))
def test_any_text_gives_hosts_or_a_usage_error_of_one_line(text):
    try:
        hosts = parse_hostfile(text)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert hosts
        assert all(host.name and (host.slots > 0 or host.slots == AUTO) for host in hosts)
        assert len({(host.user, host.name) for host in hosts}) == len(hosts)


@given(st.binary(max_size=200))
def test_any_bytes_give_hosts_or_a_usage_error_of_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any bytes"
    path.write_bytes(data)
    try:
        assert read_hostfile(str(path))
    except UsageError as error:
        assert str(error).isprintable()  # noqa: PT017  # either outcome is right
