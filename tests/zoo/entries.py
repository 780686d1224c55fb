"""All entries of the zoo."""

from zoo import (
    conditioned,
    conditioned_2,
    refused,
    samplers,
    text_to_image,
    text_to_image_2,
    text_to_image_3,
    video,
    video_2,
)
from zoo.base import Entry

TEXT_TO_IMAGE = (text_to_image, text_to_image_2, text_to_image_3)
MODULES = (*TEXT_TO_IMAGE, conditioned, conditioned_2, video, video_2, samplers, refused)
ENTRIES: list[Entry] = [entry for module in MODULES for entry in module.ENTRIES]


def name_of(entry: Entry) -> str:
    """Of a test, and of no other entry."""
    return f"{entry.name}-{entry.task}".replace(" ", "-")


BY_NAME = {name_of(entry): entry for entry in ENTRIES}
