from collections import Counter

import numpy as np
import pytest

from gerl.cluster import Pending
from gerl.protocol import Images, Prompt, Sample
from gerl.trainer.pictures import caption, chosen_pixels, shown_prompts
from gerl.utils.dataset import load_prompts


def test_the_pictures_are_spread_over_the_file_and_always_the_same() -> None:
    shown = shown_prompts(128, 32)
    assert [i // 4 for i in shown] == list(range(32)) and shown == shown_prompts(128, 32)
    assert set(Counter(i % 4 for i in shown)) == {0, 1, 2, 3}  # also where kinds of prompts take turns
    assert shown_prompts(5, 32) == shown_prompts(5, None) == list(range(5))
    assert len(shown_prompts(100, 1)) == 1


def test_words_as_well_as_numbers_of_the_signs_are_shown() -> None:
    prompts = load_prompts("signs_val")
    shown = [prompts[i].text.split('"')[1].isdigit() for i in shown_prompts(len(prompts), 32)]
    assert shown.count(True) == shown.count(False) == 16


def test_the_chosen_pictures_are_found_in_their_batches() -> None:
    samples = [Sample(Prompt(i, "x"), 0, i, 1) for i in range(5)]
    batches = [samples[:2], samples[2:4], samples[4:]]
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    drawn = [Pending("w", value=Images(k, pixels[b[0].seed : b[-1].seed + 1], 0.0)) for k, b in enumerate(batches)]
    assert [int(image[0, 0, 0]) for image in chosen_pixels(drawn, batches, [1, 4])] == [1, 4]
    drawn[1] = Pending("w")  # nothing of it is wanted, so it is not fetched
    assert len(chosen_pixels(drawn, batches, [0, 1, 4])) == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('a sign that reads "482"', "482"),
        ("a sign that reads \u201cEXIT\u201d now", "EXIT"),
        ("ein Schild: \u201eHalt\u201c", "Halt"),
        ("une pancarte \u00abNON\u00bb", "NON"),
        ("a red fox, it's fine", "a red fox, it's fine"),
        ('half a "quote', 'half a "quote'),
    ],
)
def test_the_caption_is_the_text_to_be_drawn(text: str, shown: str) -> None:
    assert caption(text, 0.126) == f"0.13 {shown}" and caption(text, None) == f"failed {shown}"
    assert caption(text, None, failed=False) == shown
