"""All entries of the zoo."""

from zoo import conditioned, conditioned_2, refused, text_to_image, text_to_image_2, text_to_image_3, video, video_2
from zoo.base import Entry

MODULES = (text_to_image, text_to_image_2, text_to_image_3, conditioned, conditioned_2, video, video_2, refused)
ENTRIES: list[Entry] = [entry for module in MODULES for entry in module.ENTRIES]


def name_of(entry: Entry) -> str:
    """Of a test, and of no other entry."""
    return f"{entry.name}-{entry.task}".replace(" ", "-")


BY_NAME = {name_of(entry): entry for entry in ENTRIES}
