"""README and manual: snippets run, commands parse, links lead somewhere, and the API page has every public name."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hvdlite_launcher.cli.flag_parser import Parser
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

import hvdlite as hvd

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "horovod" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = Sybil(parsers=[PythonCodeBlockParser()])
# The snippets of that page need other frameworks: tests/integrations runs them.
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text() and page.name != "frameworks.md"]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Defines the names that the pages assume: a model, a wrapped optimizer, a batch."""
    monkeypatch.chdir(tmp_path)
    on_term, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.Linear(20, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    x, y = torch.randn(8, 20), torch.randint(2, (8,))
    yield {
        "hvd": hvd,
        "torch": torch,
        "nn": torch.nn,
        "signal": signal,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "first_epoch": 0,
        "x": x,
        "y": y,
        "loss": torch.nn.functional.cross_entropy(model(x), y),
        "loader": [(x, y)] * 2,
        "train": lambda _batch: None,
    }
    signal.signal(signal.SIGTERM, on_term)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=ids)
def test_every_snippet_of_a_page_runs(page, program):
    document = SNIPPETS.parse(page)
    document.namespace.update(program)
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    assert count == page.read_text().count("```python")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=ids)
def test_text_is_wrapped_at_120_characters(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    too_long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    "))]
    assert too_long == []  # rows of tables and indented code cannot be wrapped


def commands_of(page: Path) -> list[list[str]]:
    """Returns the words of each hvdlite-run command in indented lines, lists of shell words, and code in sentences."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = re.findall(r"(?m)^ {4,}.*?(?<!\S)(hvdlite-run (?!\w+:).*)$", text)
    in_sentences = [words.replace("\n", " ") for words in re.findall(r"`(hvdlite-run\s[^`]+)`", text)]
    return [shlex.split(line.split(" && ")[0], comments=True) for line in [*lines, *in_sentences]]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=ids)
def test_every_command_of_a_page_is_one_that_the_launcher_takes(page):
    parser = Parser()
    for _, *words in commands_of(page):
        if words[0].endswith(":") or "..." in words:
            continue  # output of the launcher, or a placeholder for the reader's command
        if len(words) == 1 and words[0].startswith("--"):
            assert any(words[0] in flag.option_strings for flag in parser.flags)  # only a flag is mentioned
        else:
            flags, _ = parser.split_command(words)
            parser.parse_args(flags)


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=ids)
def test_every_link_of_a_page_leads_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
    for target in targets:
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.is_file(), f"{ids(page)}: {target}"
        assert not anchor or anchor in anchors_of(other), f"{ids(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_name_of_hvdlites_that_a_page_mentions_is_there(page):
    for name in re.findall(r"(?<![\w.])hvd\.(\w+)", page.read_text()):
        assert hasattr(hvd, name), f"{ids(page)}: hvd.{name}"


def test_every_public_name_is_on_the_page_of_the_api():
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in hvd.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_manual_has_every_page_in_its_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {line for line in index.splitlines() if line in pages} == pages


AROUND_THE_DIFF = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Net = lambda: nn.Linear(3, 1)
dataset = TensorDataset(torch.ones(8, 3))
"""


def test_the_program_that_readme_begins_with_runs_and_shuffles_anew_in_each_epoch():
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    own = "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    steps = "    for (batch,) in loader:\n        model(batch).sum().backward()\n        optimizer.step()\n"
    found: dict[str, object] = {}
    exec(AROUND_THE_DIFF + own + steps, found)
    assert found["loader"].sampler.epoch == found["epoch"] == 9


def test_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text().split("## The manual")[1]))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - linked == {"index"}


def test_llms_txt_lists_every_page_under_its_title_in_the_order_of_the_index():
    listed = re.findall(r"(?m)^- \[(.+)\]\((.+)\.html\): \w", (ROOT / "docs" / "llms.txt").read_text())
    contents = re.findall(r"```{toctree}\n.*?\n\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), flags=re.DOTALL)
    pages = " ".join(contents).split()
    titles = [(ROOT / "docs" / f"{page}.md").read_text().splitlines()[0].removeprefix("# ") for page in pages]
    assert listed == list(zip(titles, pages, strict=True))
