import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gerl.utils.quotes import comparable, outside_quotes, quoted_texts

# prompt -> its quoted texts, and whether it is ambiguous which one is meant
PROMPTS = {
    'a 12" pizza box that says "HOT"': (["HOT"], False),
    'a 12 " pizza box that says "HOT"': (["HOT"], False),
    'a 5\'10" man at 12½" of a sign "HI"': (["HI"], False),
    'a 12" pizza box, 2" high': ([], False),
    'the sign "482" and a 27" screen': (["482"], False),
    'a box "12" PIZZA" on a table': (['12" PIZZA'], True),
    'a sign \\"OPEN\\"': (["OPEN"], False),
    'a sign \\\\"OPEN\\\\"': (["OPEN"], False),
    'a sign "say \\"HI\\" now"': (['say "HI" now'], False),
    "a sign ``OPEN''": (["OPEN"], False),
    'a sign "He said "HI" loudly"': (['He said "HI" loudly'], False),
    'a sign "He said "HI""': (['He said "HI"'], False),
    "“a “b” c”": (["a “b” c"], False),
    "“say ‘hi’”": (["say ‘hi’"], False),
    "‘say “hi”’": (["say “hi”"], False),
    "「営業『中』」の看板": (["営業『中』"], False),
    '写着"你好"的牌子': (["你好"], False),
    "‹OUVERT›": (["OUVERT"], False),
    '"A" on a wall, "A" on a door': (["A", "A"], False),
    '"A" and "B"': (["A", "B"], True),
    '"OPEN" and an odd " mark': (["OPEN"], True),
    'the sign “A" and “B”': ([], True),
    'a sign “A" and "B"': ([], True),
}


def test_the_quoted_texts_of_prompts() -> None:
    read = {prompt: quoted_texts(prompt) for prompt in PROMPTS}
    assert {p: (texts, bool(problem)) for p, (texts, problem) in read.items()} == PROMPTS


def test_what_is_outside_of_quotes() -> None:
    assert outside_quotes('a red 12" box "BLUE" and «GREEN» «one»').split() == ["a", "red", '12"', "box", "and"]


@given(st.text(alphabet="ab1 \"'“”„«»「」‘’‹\\`", max_size=20))
def test_any_prompt_is_read(prompt: str) -> None:
    texts, _ = quoted_texts(prompt)
    assert all(len(text) <= len(prompt) for text in texts)
    assert len(outside_quotes(prompt)) <= len(prompt)


@given(st.text(max_size=12))
def test_the_comparable_form_does_not_depend_on_composition_or_spaces(text: str) -> None:
    assert comparable(unicodedata.normalize("NFD", text)) == comparable(unicodedata.normalize("NFC", text))
    assert comparable(f" \u200b{text}\ufeff\n") == comparable(text)
