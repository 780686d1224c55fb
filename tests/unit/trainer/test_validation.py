from collections import Counter

import numpy as np
import pytest

from gerl.cluster import Pending
from gerl.config import ValidationConfig
from gerl.protocol import Images, Prompt, Sample
from gerl.trainer.pictures import caption, chosen_pixels, shown_images
from gerl.utils.dataset import load_prompts


def test_the_pictures_are_spread_over_the_file_and_always_the_same() -> None:
    shown = shown_images(128, ValidationConfig())
    assert [i // 4 for i in shown] == list(range(32)) and shown == shown_images(128, ValidationConfig())
    assert set(Counter(i % 4 for i in shown)) == {0, 1, 2, 3}  # also where kinds of prompts take turns
    assert shown_images(5, ValidationConfig()) == shown_images(5, ValidationConfig(images=None)) == list(range(5))
    assert len(shown_images(100, ValidationConfig(images=1))) == 1


def test_all_images_of_the_same_prompts_are_shown() -> None:
    one, three = (shown_images(20 * n, ValidationConfig(images=4, images_per_prompt=n)) for n in (1, 3))
    assert three == [3 * i + k for i in one for k in range(3)]


def test_words_as_well_as_numbers_of_the_signs_are_shown() -> None:
    prompts = load_prompts("signs_val")
    shown = [prompts[i].text.split('"')[1].isdigit() for i in shown_images(len(prompts), ValidationConfig())]
    assert shown.count(True) == shown.count(False) == 16


def test_the_chosen_pictures_are_found_in_their_batches() -> None:
    samples = [Sample(Prompt(i, "x"), 0, i, 1) for i in range(5)]
    batches = [samples[:2], samples[2:4], samples[4:]]
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
    parts = [slice(batch[0].seed, batch[-1].seed + 1) for batch in batches]
    red = np.arange(5.0)
    drawn = [Pending("w", value=Images(k, pixels[s], 0.0, {"red": red[s]})) for k, s in enumerate(parts)]
    found, looks = chosen_pixels(drawn, batches, [1, 4])
    assert [int(image[0, 0, 0]) for image in found] == [1, 4] and list(looks["red"]) == list(red)  # of all images


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
