"""Quoted text in prompts, and the form in which texts are compared whatever code points they are written in."""

import re
import unicodedata
from collections.abc import Iterator

# opening quotation mark -> closing ones; straight single quotes are too often apostrophes
PAIRS = {
    '"': '"', "＂": "＂", "“": "”", "„": "“”", "‟": "”", "”": "”", "«": "»", "»": "«",
    "「": "」", "『": "』", "｢": "｣", "〝": "〟〞", "﹁": "﹂", "﹃": "﹄",
}  # fmt: skip
STRAIGHT = '"'
INNER = "\0"  # stands for an escaped quote within others; no prompt has it
# typographic single quotes that cannot be apostrophes: ’ inside a word is one, before or after a word it may be
QUOTED_SINGLE = re.compile(r"(?<!\w)[‘‚]((?:[^‘’‚]|’(?=\w))*)[’‘](?!\w)|‹([^‹›]*)›|›([^‹›]*)‹")
ESCAPED = re.compile(r'\\+(["\'])')

# each mark and those that are typed or recognised in its place; more dashes are found by their category
MARKS = {"'": "’‘‛‚ʼʹ′`´ʻ׳", '"': "“”„‟″〝〞〟״"}
TRANSLATION = str.maketrans({mark: plain for plain, marks in MARKS.items() for mark in marks} | {"−": "-"})


def comparable(text: str) -> str:
    """Return `text` as NFKC, case-folded, with plain apostrophes, quotes and dashes, without invisible characters.

    Whitespace, format characters (category Cf) and variation selectors are left out.
    """
    text = unicodedata.normalize("NFKC", text.translate(TRANSLATION)).casefold()
    text = "".join(map(_plain, unicodedata.normalize("NFKC", text).translate(TRANSLATION)))
    return unicodedata.normalize("NFKC", text)  # what was left out may have kept an accent from its letter


def _plain(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cf" or character.isspace() or "\ufe00" <= character <= "\ufe0f":
        return ""
    return "-" if category == "Pd" else character


def quoted_texts(prompt: str) -> tuple[list[str], str]:
    """Return the quoted texts of a prompt in their order, and what is ambiguous about them ("" if nothing is).

    A straight quote after a digit does not open a text: it is a length in inches. Escaped quotes are quotes, and within
    other quotes part of the text. Of nested quotes the outer ones count. Single typographic quotes count where there
    are no double ones, or around them.
    """
    prompt, spans = _quoted(prompt)
    texts = [prompt[start + 1 : end - 1].replace(INNER, STRAIGHT).strip() for start, end in spans]
    if (several := len(set(map(comparable, texts)))) > 1:
        return texts, f"{several} quoted texts"
    outside = (place for place in range(len(prompt)) if not any(start <= place < end for start, end in spans))
    if any(prompt[place] in PAIRS and not _is_length(prompt, place) for place in outside):
        return texts, "a quotation mark without its pair"
    if any(re.search(r'\d"', text) for text in texts):
        return texts, "a quotation mark or a length in inches within the text"
    return texts, ""


def outside_quotes(prompt: str) -> str:
    """Return the prompt with a space in place of each quoted text."""
    prompt, spans = _quoted(prompt)
    for start, end in reversed(spans):
        prompt = f"{prompt[:start]} {prompt[end:]}"
    return prompt


def _quoted(prompt: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the prompt with plain quotes, and the start and end of each quoted text, with its quotes."""
    prompt = _unescaped(prompt)
    double = list(_double(prompt))
    single = [match.span() for match in QUOTED_SINGLE.finditer(prompt)]
    if double:
        single = [(a, b) for a, b in single if any(a < start and end < b for start, end in double)]
        double = [(start, end) for start, end in double if not any(a < start and end < b for a, b in single)]
    return prompt, sorted(double + single)


def _unescaped(prompt: str) -> str:
    """Return the prompt with plain quotes, and `INNER` for those that are escaped within others."""
    prompt = re.sub(r"``(.*?)''", r'"\1"', prompt)
    return ESCAPED.sub(INNER if STRAIGHT in ESCAPED.sub("", prompt) else r"\1", prompt)


def _double(prompt: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each text in double quotes, with its quotes."""
    place = 0
    while place < len(prompt):
        mark = prompt[place]
        end = None
        if mark in PAIRS and not _is_length(prompt, place):
            end = _end_straight(prompt, place) if mark == STRAIGHT else _end(prompt, place)
            if end is None and mark in "“„":
                return  # the marks that follow may belong to it
        if end is not None:
            yield place, end
        place = place + 1 if end is None else end


def _is_length(prompt: str, place: int) -> bool:
    """Whether the mark at `place` means inches, where no text is open: straight, after a digit."""
    if prompt[place] != STRAIGHT:
        return False
    before = prompt[:place]
    spaced = before.endswith(" ") and prompt[place + 1 : place + 2].isspace()
    return unicodedata.category((before.rstrip() if spaced else before)[-1:] or " ") in ("Nd", "No")


def _end(prompt: str, start: int) -> int | None:
    """Return the end of the text that the typographic mark at `start` opens, with those of its kind nested in it."""
    opening, depth = prompt[start], 0
    for place in range(start + 1, len(prompt)):
        if prompt[place] in PAIRS[opening]:
            if not depth:
                return place + 1
            depth -= 1
        elif prompt[place] == opening:
            depth += 1
    return None


def _end_straight(prompt: str, start: int) -> int | None:
    """Return the end of the text that the straight quote at `start` opens."""
    marks = [place for place in range(start + 1, len(prompt)) if prompt[place] == STRAIGHT]
    if not marks:
        return None
    depth = 1
    for number, place in enumerate(marks):  # of nested ones, the inner ones begin after a space and before a word
        opens = prompt[place - 1].isspace() and prompt[place + 1 : place + 2].isalnum() and place > start + 1
        if opens and number == 0:
            depth = 2
        elif number == 0:
            break
        else:
            depth += 1 if opens else -1
        if not depth:
            return place + 1
    # a length within the text: the mark that would end it leaves another one without its pair
    after = [place for place in marks[1:] if not _is_length(prompt, place)]
    return (marks[1] if len(after) % 2 and _is_length(prompt, marks[0]) else marks[0]) + 1
