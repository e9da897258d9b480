"""The syntax of -H, and which hosts are this machine."""

import socket

import pytest
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.hosts import (
    AUTO,
    Host,
    count_auto_slots,
    each_once,
    find_this_machine,
    parse_host,
    parse_hosts,
    read_hostfile,
)
from hypothesis import given
from hypothesis import strategies as st


def test_every_form_of_a_host_is_read():
    assert parse_hosts("a:2,user@b:4,[fd00::1]:2,c, 10.0.0.7:1") == (
        Host("a", 2),
        Host("b", 4, "user"),
        Host("fd00::1", 2),
        Host("c", 1),
        Host("10.0.0.7", 1),
    )


PIECES = st.sampled_from(["a", "b", ":", ",", "auto", "4", "0", "user@", "[fd00::1]", "\n", "\0"])


def test_auto_slots_are_counted_by_who_is_asked():
    hosts = parse_hosts("a:auto,b:2,user@c:auto")
    assert hosts[0] == Host("a", AUTO)
    counted = count_auto_slots(hosts, lambda host: {"a": 8, "c": 4}[host.name])
    assert counted == (Host("a", 8), Host("b", 2), Host("c", 4, "user"))


def test_a_host_that_has_all_its_slots_cannot_have_more():
    for text in ("a:auto,a:2", "a:2,a:auto", "a:auto,a:auto"):
        assert parse_hosts(text) == (Host("a", AUTO),)


def test_a_host_named_twice_is_one_host_with_the_slots_of_both():
    assert parse_hosts("a:2,b:1,a,a:3") == (Host("a", 6), Host("b", 1))


@pytest.mark.parametrize(
    "item", ["a:", "a:x", "a:-1", ":2", "a:2:3", "", "-a:2", "a b:2", "@a:2", "[a]:2", "a:²", "a:Auto"]
)
def test_what_is_no_host_is_named_with_a_right_example(item):
    with pytest.raises(UsageError) as error:
        parse_hosts(f"good:1,{item}")
    assert str(error.value).startswith(f"-H: {item!r} is not host:slots")
    assert "node1:4" in str(error.value) or "[fd00::1]:4" in str(error.value)


@pytest.mark.parametrize("item", ["-oProxyCommand=id@h:1", "-lroot:1", "u@-oA=b:1", "-", "--:2", "-u@[fd00::1]"])
def test_what_ssh_would_take_for_an_option_is_refused_wherever_hosts_are_named(item, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"good\n{item}\n")
    for read in (lambda: parse_hosts(f"good:1,{item}"), lambda: read_hostfile(str(hostfile))):
        with pytest.raises(UsageError, match="begins with - as an option") as error:
            read()
        assert "\n" not in str(error.value)


# A shell would interpret these characters, if the user's ProxyCommand has %r in it; a terminal would, too.
@pytest.mark.parametrize(
    "user",
    ["a;id", "`id`", "$(id)", "a|b", "a&b", "a'b", 'a"b', "a>b", "a\\", "a\x1b[2J", "a\x07", "a\x9b1m", "a\u202eb"],
)
def test_a_user_that_no_login_has_is_refused_and_shown_so_that_it_does_nothing(user):
    with pytest.raises(UsageError, match="is not host:slots") as error:
        parse_hosts(f"{user}@h:1")
    assert str(error.value).isprintable()


def test_a_user_may_have_dots_dashes_a_domain_and_letters_of_any_language():
    for user in ("a.b-c_d", "DOMAIN\\user", "jürgen", "user+tag", "machine"):
        assert parse_hosts(f"{user}@h:1") == (Host("h", 1, user),)


def test_an_ipv6_address_without_brackets_is_told_of_them():
    with pytest.raises(UsageError, match=r"brackets, such as \[fd00::1\]:4"):
        parse_hosts("fd00::1:2")


@pytest.mark.parametrize("item", ["a:0", "a:00", "a:99999999999"])
def test_no_slots_and_absurdly_many_are_refused(item):
    with pytest.raises(UsageError, match=item):
        parse_hosts(item)


@given(st.text() | st.text(alphabet="ab:@[],.-0123 ") | st.lists(PIECES).map("".join))
def test_any_text_gives_hosts_or_a_usage_error(text):
    try:
        hosts = parse_hosts(text)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert hosts
        assert all(host.name and (host.slots > 0 or host.slots == AUTO) for host in hosts)
        assert len({(host.user, host.name) for host in hosts}) == len(hosts)


def test_all_names_of_this_machine_are_one_host_under_the_first_name():
    hosts = (Host("127.0.0.1", 2), Host("b.invalid", 3), Host("localhost", 1), Host(socket.gethostname(), 1))
    assert find_this_machine(hosts) == (Host("127.0.0.1", 4, is_here=True), Host("b.invalid", 3))


@pytest.mark.parametrize("host", [Host("node7.invalid"), Host("localhost", 1, "somebody.else")])
def test_another_name_or_another_user_is_another_host(host):
    assert find_this_machine((Host("localhost"), host)) == (Host("localhost", is_here=True), host)


def test_hosts_that_turn_out_to_be_one_machine_are_one_with_the_slots_of_all():
    hosts = (Host("node1", 2), Host("other", 1), Host("node1", 1, "root"), Host("unknown", 1), Host("alias", 4))
    machines = {"node1": "m1", "root@node1": "m1", "alias": "m1", "other": "m2", "unknown": None}
    once = each_once(hosts, lambda host: machines[host.label] or host.label)
    assert once == (Host("node1", 7), Host("other", 1), Host("unknown", 1))


def test_all_slots_of_a_machine_are_counted_once():
    assert each_once((Host("a", AUTO), Host("b", 2)), lambda _: "m") == (Host("a", AUTO),)


@pytest.mark.parametrize("name", ["a..b", "x" * 70, "."])
def test_what_can_be_no_name_in_dns_is_another_machine(name):
    assert find_this_machine((Host(name),)) == (Host(name),)


@pytest.mark.parametrize("error", [KeyError("uid not found: 4711"), OSError("No username set in the environment")])
def test_a_host_with_a_user_is_another_host_where_the_own_uid_has_no_name(monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr("getpass.getuser", fails)
    (host,) = find_this_machine([parse_host("somebody@localhost:2")])
    assert not host.is_here
