"""Flags from a YAML file work as on the command line, and an error is one line that names the file and the line."""

import argparse

import pytest
from hvdlite_launcher.cli import hvdlite_run
from hvdlite_launcher.cli.config_file import config_words
from hvdlite_launcher.cli.flag_parser import Parser
from hvdlite_launcher.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st
from long_run import trials

EVERYTHING = """\
num_proc: 4  # as Horovod's users write it
hosts: [localhost:2, "node1:2"]
output-filename: out
prefix-output-with-timestamp: yes
environment:
  LR: 0.10
  FLAG: no
  TIME: 1:30
  TOKEN:
grace: 5
verbose: true
no-env: off
"""

WORDS = st.sampled_from(
    [
        *("controller", "params", "timeline", "stall_check", "enabled", "log_file"),
        *("num-proc", "hosts", "x", "verbose", "a", "1", ":", ": ", "- ", "[", "]", "{", "}", ",", "&a", "*a", "<<"),
        *(
            "!!int ",
            '"',
            "'",
            "|",
            ">",
            "\\U99999999",
            "\\x00",
            "%",
            "---",
            "...",
            "?",
            "#",
            "~",
            "@",
            "\n",
            "\n  ",
            "\t",
            "\r",
            "é",
        ),
    ]
)


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "config.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def parsed(*argv: str) -> argparse.Namespace:
    return Parser().parse_args(argv)


def test_a_file_says_the_same_as_the_flags(write):
    assert parsed(*config_words(write(EVERYTHING), Parser())) == parsed(
        *("-np", "4", "-H", "localhost:2,node1:2", "--output-filename", "out", "--prefix-output-with-timestamp"),
        *("-x", "LR=0.10", "-x", "FLAG=no", "-x", "TIME=1:30", "-x", "TOKEN", "--grace", "5", "--verbose"),
    )


@pytest.mark.parametrize("flag", Parser().flags, ids=lambda flag: flag.option_strings[-1])
def test_every_flag_is_a_key_but_those_that_answer_a_question(flag, write):
    key = flag.option_strings[-1].lstrip("-")
    values = {"log-level": "INFO", "autotune-gaussian-process-noise": "1", "on-failure": "shrink"}
    value = "true" if flag.nargs == 0 else values.get(key, "7")
    if flag.nargs == 2:
        words = config_words(write(f"{key}: [{value}, {value}]"), Parser())
        assert parsed(*words) == parsed(flag.option_strings[-1], value, value)
    elif key in ("help", "version", "config-file", "check-build", "ps", "report", "diagnose"):
        with pytest.raises(UsageError, match=f"unknown key '{key}'"):
            config_words(write(f"{key}: {value}"), Parser())
    else:
        words = config_words(write(f"{key}: {value}"), Parser())
        assert parsed(*words) == parsed(flag.option_strings[-1], *([] if flag.nargs == 0 else [value]))
        assert parsed(*words) != parsed()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", []),
        ("# nothing yet\n", []),
        ("---\n", []),
        ("null", []),
        ("verbose: false", []),
        ("x: A=1", ["-x=A=1"]),
        ("x: [A=1, B]", ["-x=A=1", "-x=B"]),
        ('environment: {A: "", B: "~"}', ["-x=A=", "-x=B=~"]),
        ("environment: []", []),
        ("np: 3", ["--num-proc=3"]),
        ("hosts: localhost:2,node1:2", ["--hosts=localhost:2,node1:2"]),
        ("hosts:\n- '[fd00::1]:2'\n", ["--hosts=[fd00::1]:2"]),
        ("output-filename: -odd name=x", ["--output-filename=-odd name=x"]),
        ("output-filename: 2024-01-01", ["--output-filename=2024-01-01"]),
        (b"\xef\xbb\xbfnum-proc: 2\r\n", ["--num-proc=2"]),
    ],
)
def test_values_are_the_text_that_stands_there(content, words, write):
    assert config_words(write(content), Parser()) == words
    parsed(*words)


HOROVODS = """\
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: false
autotune:
  enabled: true
  log_file: log.txt
  gaussian_process_noise: 0.9
timeline: {filename: /tmp/t.json, mark_cycles: true}
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options: {mpi_threads_disable: true, num_nccl_streams: 2}
logging:
  level: INFO
  hide_timestamp: true
"""


def test_a_file_of_horovodruns_says_in_its_sections_what_the_flags_say(write):
    assert parsed(*config_words(write(HOROVODS), Parser())) == parsed(
        *("--mpi", "--fusion-threshold-mb", "32", "--cycle-time-ms", "10", "--no-hierarchical-allreduce", "--autotune"),
        *("--autotune-log-file", "log.txt", "--autotune-gaussian-process-noise", "0.9"),
        *("--timeline-filename", "/tmp/t.json", "--timeline-mark-cycles", "--no-stall-check"),
        *("--stall-check-warning-time-seconds", "120", "--stall-check-shutdown-time-seconds", "240"),
        *("--mpi-threads-disable", "--num-nccl-streams", "2", "--log-level", "INFO", "--log-hide-timestamp"),
    )


def test_a_switch_that_is_false_is_the_contrary_switch_where_there_is_one(write):
    content = "no-stall-check: false\nlogging: {hide_timestamp: false}\nparams:\nautotune: false\n"
    assert config_words(write(content), Parser()) == ["--stall-check", "--no-log-hide-timestamp", "--no-autotune"]


@pytest.mark.parametrize("config_file_first", [True, False])
def test_the_command_line_wins_wherever_it_names_the_file(config_file_first, write, capsys):
    file, flags = ["--config-file", write("num-proc: 4\nhosts: localhost:8\n")], ["-np", "2"]
    assert hvdlite_run.main([*(file + flags if config_file_first else flags + file), "--dry-run"]) == 0
    assert "HVDLITE_SIZE=2\n" in capsys.readouterr().out


def test_an_interface_on_the_command_line_takes_the_place_of_the_files(write):
    options = hvdlite_run.read_flags(["--network-interface", "b", "--config-file", write("network-interface: [a, c]")])
    assert options.network_interface == {"": "b"}


@pytest.mark.parametrize("flag", ["hosts", "hostfile"])
def test_hosts_on_the_command_line_take_the_place_of_the_files_whichever_way_either_is_said(
    flag, tmp_path, write, capsys
):
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    values = {"hosts": "localhost:2", "hostfile": str(tmp_path / "hostfile")}
    path = write(f"{flag}: node1:3\n")
    for other, value in values.items():
        assert hvdlite_run.main([f"--{other}", value, "--config-file", path, "--dry-run"]) == 0
        assert "HVDLITE_SIZE=2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("num-procs: 4", ", line 1: unknown key 'num-procs'; did you mean num-proc?"),
        ("H: a", ", line 1: unknown key 'H'; see hvdlite-run --help"),
        ("verbose: true\n\n1: 2", ", line 3: unknown key '1'; see"),
        ("[a]: b", ", line 1: unknown key ''; see"),
        ("num-proc: 4\nnum_proc: 5", ", line 2: num_proc is already set in line 1: set it once"),
        ("x: A=1\nenvironment: {}", ", line 2: environment is already set in line 1"),
        ("environment: {A: 1, A: 2}", ", line 1: environment: a name in it is given twice"),
        ("num-proc: many", ", line 1: num-proc: 'many' is not a number of workers, such as 4"),
        ("num-proc: 4.0", ", line 1: num-proc: '4.0' is not a number of workers"),
        ("num-proc: [4]", ", line 1: num-proc: it must be a single value, not a list"),
        ("num-proc: {a: 4}", ", line 1: num-proc: it must be a single value, not a mapping"),
        ("num-proc:", ", line 1: num-proc: it has no value: give one, or leave it out"),
        ("hosts: {a: 2}", ", line 1: hosts: it must be a single value, not a mapping"),
        ("hosts:\n- a: 2", ", line 1: hosts: a list or mapping within another is not supported"),
        ("hosts: &a [*a]", ", line 1: hosts: a list or mapping within another is not supported"),
        ("verbose: 1", ", line 1: verbose: '1' is neither true nor false"),
        ("verbose: [true]", ", line 1: verbose: it must be a single value, not a list"),
        ("grace: -1", ", line 1: grace: '-1' is not a number of seconds"),
        ("environment: {A=B: 1}", ", line 1: environment: the name of a variable cannot contain ="),
        ('x: "A=s3cret\\0"', ", line 1: x: it has a character that a command line cannot contain\n"),
        ('x: "A=\\ud800"', ", line 1: x: it has a character that a command line cannot contain\n"),
        ("x: !!python/object/apply:os.system A", ", line 1: x: the YAML tag 'tag:yaml.org,2002:python/object"),
        ("num-proc: 4\n  verbose: true", ", line 2: not YAML: mapping values are not allowed here"),
        ("hosts: [a, b", ", line 1: not YAML: expected ',' or ']'"),
        ("hosts: [fd00::1]:2", ", line 1: not YAML: "),
        ("a: 1\n---\nb: 2\n", ", line 2: not YAML: but found another document"),
        ("num-proc: \0", ": not YAML: unacceptable character"),
        (b"num-proc: \xff", ": not YAML: "),
        ("[" * 1000, ": nested too deeply for a file of flags"),
        ("- num-proc", ": it must be lines of flags and values, such as num-proc: 4"),
        ("num-proc=4", ": it must be lines of flags and values"),
        ("#" * (1 << 19), ": too large for a file of flags"),
        ("controller: {}", ", line 1: controller: it must be gloo, mpi or jsrun"),
        ("logging: 1", ", line 1: unknown key 'logging'; "),
        ("params: [1]", ", line 1: params: it must be a section of flags and values, not a list"),
        ("params:\n  cycle_time_ms: -1", ", line 2: params: cycle_time_ms: cycle_time_ms=-1 must be >= 0"),
        ("timeline:\n  file: x", ", line 2: unknown key 'timeline: file'; "),
        ("timeline: {[a]: x}", ", line 1: unknown key 'timeline: '; "),
        ("stall_check: {enabled: maybe}", ", line 1: stall_check: enabled: 'maybe' is neither true nor false"),
        ("log_level: INFO\nlogging: {level: INFO}", ", line 2: logging: level is already set in line 1: set it once"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_file_and_the_place(content, said, write, capsys):
    path = write(content)
    assert hvdlite_run.main(["--config-file", path, "-np", "1", "true"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hvdlite-run: --config-file {path}{said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [("/no/such", "/no/such: no such file"), ("/", "/: is a directory"), ("", "'': no such file"), ("\0", "'\\x00': ")],
)
def test_a_file_that_cannot_be_read_is_named(path, said, capsys):
    assert hvdlite_run.main(["--config-file", path, "-np", "1", "true"]) == 2
    assert capsys.readouterr().err.startswith(f"hvdlite-run: --config-file {said}")


@pytest.mark.slow
@settings(max_examples=trials(400, 2000), deadline=None)
@given(st.lists(WORDS).map("".join) | st.text())
def test_whatever_is_in_the_file_gives_words_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    said = ""
    try:
        parsed(*config_words(str(path), Parser()))
    except UsageError as error:
        said = str(error)
    assert said.isprintable()
