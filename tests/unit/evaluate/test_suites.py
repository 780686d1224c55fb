"""The suites that ship, and what counts as a deviation from one."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gerl.commandline.composition import compose_run, spelled
from gerl.errors import ConfigError, DataError
from gerl.evaluate.command import Request, parse
from gerl.evaluate.suites import FOLDER, PromptFile, Suite, listing, load, names
from gerl.protocol import Prompt
from gerl.rewards.scorers import SCORERS
from gerl.utils.dataset import load_prompts
from reward_models.scorers.vqa import DpgScorer

RUNNABLE = [name for name in names() if not load(name).missing]


def suite_file(folder: Path, **changes: object) -> str:
    """A suite for the signs model with its prompts beside it, whose tasks are `even` and `odd`."""
    lines = [json.dumps({"prompt": f'a sign that reads "{i}"', "kind": ("even", "odd")[i % 2]}) for i in range(5)]
    (folder / "mine.jsonl").write_text("\n".join(lines) + "\n")
    keys = {"sampling.height": 16, "sampling.width": 32, "validation.num_inference_steps": 2}
    content: dict[str, object] = {
        "title": "Signs, even and odd",
        "source": "a test",
        "prompts": {"source": "a test", "file": "mine.jsonl", "count": 5, "licence": "CC0"}
        | {"sha256": hashlib.sha256((folder / "mine.jsonl").read_bytes()).hexdigest()},
        "scorers": {"sharpness": {"weight": 1.0}, "colourfulness": {"weight": 0.0}},
        "columns": {"sharpness": {"name": "Sharpness", "over": "tasks", "factor": 2.0}},
        "tasks": {"column": "kind", "names": ["even", "odd"]},
        "protocols": {"signs": {"source": "a test", "models": ["signs"], "images": 2, "keys": keys}},
        "published": [{"model": "M", "source": "a paper", "values": {"sharpness": 12345.0}, "tasks": {"odd": 54321.0}}],
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(content | changes))
    load.cache_clear()
    return str(folder / "mine.yaml")


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., Request]:
    suite = suite_file(tmp_path)
    return lambda *arguments: parse([f"suite={suite}", "out=o", *arguments])


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shipped_suite_is_complete(name: str) -> None:
    suite = load(name)
    assert suite.prompts is not None and suite.differs
    assert suite.protocols or any("prescribes no size, steps and guidance" in text for text in suite.differs)
    assert bool(suite.published) != bool(suite.unpublished)
    assert "at commit" in suite.prompts.source and suite.prompts.licence
    assert set(suite.scorers) <= set(SCORERS) and set(suite.needs) <= set(suite.scorers)
    assert sum(entry["weight"] for entry in suite.scorers.values()) == 1  # the others are watched
    assert any(entry["weight"] == 0 for entry in suite.scorers.values())
    for row in suite.published:
        assert "arXiv" in row.source or "README" in row.source
        assert row.values and set(row.tasks) == (set(suite.tasks.names) if suite.tasks else set())
    for protocol in suite.protocols.values():
        assert {"sampling.height", "sampling.width", "validation.num_inference_steps"} < set(protocol.keys)


@pytest.mark.parametrize("name", names())
def test_a_file_that_ships_with_a_suite_has_its_digest(name: str) -> None:
    prompts = load(name).prompts
    if prompts is not None and (FOLDER / prompts.file).exists():
        assert prompts.digest_of((FOLDER / prompts.file).read_bytes()) in (prompts.sha256, prompts.git_blob)
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}  # no prompts of others ship


def test_genevals_published_rows_are_the_means_of_their_tasks() -> None:
    for row in load("geneval").published:
        assert sum(row.tasks.values()) / 6 == pytest.approx(row.values["geneval/geneval_benchmark"], abs=0.0101)


def test_the_listing_names_every_suite_its_licence_and_what_is_missing() -> None:
    text = listing()
    assert all(f"\n{name}\n" in f"\n{text}" for name in names())
    assert "not the published protocol: the questions are answered by" in text and "no published rows: " in text
    assert "MIT (LICENSE" in text and "reward.scorers.deqa.kwargs.url, else skipped" in text
    assert "needs: reward.scorers.dpg.kwargs.base_url\n" in text


@pytest.mark.parametrize("value", [None, 3, 0.5, True, "a 'b' \\ {c: d}", [1, 2], {"a": {"b": "x/y", "c": [0.5]}}, {}])
def test_a_value_survives_the_command_line(value: object) -> None:
    config = compose_run(["experiment=plain", f"sampling.call.mine={spelled(value)}"]).config
    assert config.sampling.call["mine"] == value


def test_the_protocol_is_pinned_for_its_model(request_of: Callable[..., Request]) -> None:
    found = request_of()
    assert found.images == 2 and found.deviations == ()
    assert (found.config.sampling.height, found.config.sampling.width) == (16, 32)
    assert found.config.validation.num_inference_steps == 2
    assert set(found.config.reward.scorers) == {"sharpness", "colourfulness"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sampling.width=16", "sampling.width=16 (pinned: 32)"),
        ("images=1", "images=1 (pinned: 2)"),
        ("validation.max_prompts=2", "validation.max_prompts=2 (pinned: null)"),
        ("model.dtype=bfloat16", "model.dtype=bfloat16 (pinned: auto)"),
        (
            "sampling.call.max_sequence_length=8",
            'sampling.call={"max_sequence_length": 8} (pinned: {"max_sequence_length": 1})',
        ),
        ("sampling.cache=first_block", "sampling.cache=first_block (pinned: none)"),
        ("reward.scorers.jpeg_compressibility.weight=1", "scorer jpeg_compressibility added with a weight"),
        ("~reward.scorers.sharpness", "scorer sharpness left out"),
    ],
)
def test_a_key_besides_is_a_deviation(request_of: Callable[..., Request], given: str, expected: str) -> None:
    keys = [given] if not given.startswith("~") else [given, "reward.scorers.colourfulness.weight=1"]
    assert any(text.startswith(expected) for text in request_of(*keys).deviations)


@pytest.mark.parametrize(
    "given",
    [
        "sampling.width=32",
        "images=2",
        "validation.micro_batch_size=1",
        "cluster.launcher=local",
        "reward.scorers.jpeg_compressibility.weight=0",
        "~reward.scorers.colourfulness",
        "reward.scorers.sharpness.timeout=5",
    ],
)
def test_what_decides_no_number_is_no_deviation(request_of: Callable[..., Request], given: str) -> None:
    assert request_of(given).deviations == ()


def test_another_model_has_no_protocol_but_can_be_given_one(request_of: Callable[..., Request]) -> None:
    other = request_of("model=owner/name", "sampling.width=48")
    assert other.images == 1 and other.deviations == (
        "no protocol is published for owner/name: size, steps and guidance are your own",
    )
    chosen = request_of("model=owner/name", "suite_protocol=signs")
    assert chosen.images == 2 and chosen.config.sampling.width == 32
    assert chosen.deviations == ("the protocol signs, which is not published for owner/name",)


def test_drawbench_measures_aesthetic_without_a_file_of_the_users(tmp_path: Path) -> None:
    aesthetic = {"aesthetic": {"weight": 1.0}}
    columns = {"aesthetic": {"name": "Aesthetic"}}
    suite = suite_file(tmp_path, scorers=aesthetic, columns=columns, tasks=None, published=[])
    assert "aesthetic" in load("drawbench").scorers and "aesthetic" not in load("drawbench").needs
    copy = parse([f"suite={suite}", "out=o", f"reward.scorers.aesthetic.kwargs.repository={tmp_path}"])
    assert copy.deviations == ()  # the head is known by its digest, wherever it comes from


def test_a_scorer_that_needs_an_address_is_left_out_until_it_has_one(tmp_path: Path) -> None:
    own = {"sharpness": {"weight": 1.0}, "deqa": {"weight": 0.0}}
    columns = {"sharpness": {"name": "Sharpness"}, "deqa": {"name": "DeQA", "factor": 5.0}}
    suite = suite_file(tmp_path, scorers=own, needs={"deqa": "url"}, columns=columns, tasks=None, published=[])
    without = parse([f"suite={suite}", "out=o"])
    assert without.suite and without.suite.absent == ("DeQA: give reward.scorers.deqa.kwargs.url",)
    assert "deqa" not in without.config.reward.scorers
    given = parse([f"suite={suite}", "out=o", "reward.scorers.deqa.kwargs.url=http://localhost:1"])
    assert given.suite and given.suite.absent == () and given.deviations == ()
    assert given.config.reward.scorers["deqa"].kwargs == {"url": "http://localhost:1"}


def test_without_what_it_measures_with_a_suite_is_refused() -> None:
    for name, scorer in (("dpg", "dpg"), ("geneval2", "geneval2")):
        with pytest.raises(ConfigError, match=rf"suite={name}: .* give reward\.scorers\.{scorer}\.kwargs\.base_url"):
            parse([f"suite={name}", "out=o"])


def test_a_suite_with_another_judge_is_never_the_published_protocol(tmp_path: Path) -> None:
    columns = {"sharpness": {"name": "Sharpness", "here": "Sharpness by another judge"}}
    keys = {"columns": columns, "tasks": None, "published": [], "deviates": ["another judge"]}
    found = parse([f"suite={suite_file(tmp_path, **keys)}", "out=o"])
    assert found.deviations == ("another judge",)
    assert load("dpg").deviates and load("dpg").columns["dpg"].measured != load("dpg").columns["dpg"].name


def test_where_no_protocol_is_published_the_settings_are_free_and_the_images_are_not(tmp_path: Path) -> None:
    suite = suite_file(tmp_path, protocols={}, images=4)
    free = parse([f"suite={suite}", "out=o", "sampling.width=48", "validation.num_inference_steps=7"])
    assert (free.images, free.deviations) == (4, ())
    assert parse([f"suite={suite}", "out=o", "images=1"]).deviations == ("images=1 (pinned: 4)",)


def graph_of_questions(folder: Path) -> PromptFile:
    """Two prompts with two questions and one, in rows that are not in one piece."""
    rows = [("p", "a cat", "1", "0", "Cat?"), ("q", "a dog", "1", "0", "Dog?"), ("p", "a cat", "2", "1", "Red?")]
    names = "item_id,text,proposition_id,dependency,question_natural_language"
    (folder / "graph.csv").write_text("\n".join([names, *map(",".join, rows)]) + "\n")
    return PromptFile("here", "graph.csv", 2, "CC0", git_blob="0" * 40, key="text", gather="item_id")


def test_rows_of_one_prompt_are_gathered_to_its_questions(tmp_path: Path) -> None:
    file = graph_of_questions(tmp_path)
    first, second = file.arrange(load_prompts(str(tmp_path / "graph.csv"), "text"))
    assert (first.text, second.text, first.id, second.id) == ("a cat", "a dog", 0, 1)
    assert [row["question_natural_language"] for row in first.metadata["questions"]] == ["Cat?", "Red?"]
    scorer = DpgScorer(base_url="http://127.0.0.1:1/v1")
    scorer.check_prompts([first, second])
    assert scorer.questions(first.text, first.metadata)[2].parents == (1,)
    with pytest.raises(DataError, match=r"prompt 3: 'a sign' has no 'item_id': use the suite's file"):
        file.arrange([Prompt(3, "a sign")])


def test_a_file_may_be_known_by_its_name_in_git(tmp_path: Path) -> None:
    graph_of_questions(tmp_path)
    content = (tmp_path / "graph.csv").read_bytes()
    git = ["git", "hash-object", "--no-filters", str(tmp_path / "graph.csv")]
    blob = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    assert PromptFile("here", "graph.csv", 2, "CC0", git_blob=blob).digest_of(content) == blob
    prompts = {"source": "here", "file": "mine.jsonl", "count": 5, "licence": "CC0", "git_blob": blob}
    with pytest.raises(DataError, match=rf"expected the git blob {blob} of mine\.jsonl of here, got [0-9a-f]{{40}};"):
        parse([f"suite={suite_file(tmp_path, prompts=prompts)}", "out=o"])


@pytest.mark.parametrize("task", ["spatial", "numeracy"])
def test_parts_of_t2i_compbench_without_a_scorer_are_refused_with_the_reason(task: str) -> None:
    with pytest.raises(ConfigError, match=rf"suite=t2i_compbench_{task} cannot be run: .*UniDet.*{task}_val\.txt"):
        parse([f"suite=t2i_compbench_{task}", "out=o"])


def test_another_file_than_the_suites_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "a cat"}\n')
    digest = hashlib.sha256((tmp_path / "other.jsonl").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=rf"suite_prompts=.*other\.jsonl: expected the SHA-256 5c48e081.*got {digest}"):
        parse(["suite=geneval", f"suite_prompts={tmp_path / 'other.jsonl'}", "out=o"])
    with pytest.raises(DataError, match=r"keep the suffix \.jsonl"):
        suite = suite_file(tmp_path)
        (tmp_path / "mine.txt").write_bytes((tmp_path / "mine.jsonl").read_bytes())
        parse([f"suite={suite}", f"suite_prompts={tmp_path / 'mine.txt'}", "out=o"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": None}, "a column is over tasks, but there are no tasks"),
        ({"scorers": {"ocr": {"weight": 1.0}}}, "the column sharpness belongs to no scorer"),
        ({"published": [{"model": "M", "source": "P", "values": {"zzz": 1.0}}]}, "a published row has zzz"),
        ({"zzz": 1}, "zzz: "),
        ({"prompts": None}, "say in missing why it cannot be run"),
        ({"prompts": {"source": "s", "file": "f", "count": 1, "licence": "l"}}, "either sha256 or git_blob"),
    ],
)
def test_a_suite_that_is_not_complete_is_refused(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(suite_file(tmp_path, **changes))


def test_a_suite_that_only_says_what_it_lacks_is_whole() -> None:
    assert Suite(title="t", source="s", missing="gerl has no such scorer").columns == {}
